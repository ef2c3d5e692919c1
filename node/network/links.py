"""Measures the links between this node and its peers: each direction alone, then several together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from itertools import accumulate, count
from typing import Any

import grpc
import grpc.aio

from dtfm.node.network.bandwidth_probe import (
    MOST_BYTES,
    Arrivals,
    is_enough,
    rate_of,
    receive_probe,
    send_probe,
    window_seconds,
)
from dtfm.node.network.dialling import Dialler
from dtfm.protos import MEASURED_TOGETHER
from dtfm.protos.control_pb2 import LinkReport, Peer, Reached
from dtfm.protos.streams import method, seen_as

PINGS = 5
"""Pings to a peer; the shortest round trip counts."""
MEASURING_LEASES = 4
"""Most leases that the probes of one direction take together; the coordinator waits for PROBE_LEASES."""
LEAST_WINDOWS = 2
"""The windows that a probe may take even if no time is left."""
MOST_BYTES_TOGETHER = 4 * MOST_BYTES
"""Most bytes that these probes send together."""
SHARED_LINE = 0.55
"""Links that carry less than this fraction of their sum when measured together share a line."""
HELD_UP = 2
"""A link that is this many times faster beside others than alone was held up by something else when alone."""

#: The sizes in bytes of a probe's pieces, as they arrive.
Sizes = AsyncGenerator[int, None]


async def measure_links(
    node: str,
    peers: Sequence[Peer],
    dialler: Dialler,
    lease: float,
    measured: Callable[[int, int], None] = lambda done, of: None,
) -> LinkReport:
    """Measures the links node -> peer and peer -> node of each peer.

    Latency is one way, in seconds: half the shortest round trip. Bandwidth is in bytes per second (see bandwidth_probe.py). A
    peer has bandwidth 0 and a problem if it does not answer within half a ``lease``, or if too little of its probe arrives.
    ``up`` and ``down`` are the bytes per second to, and from, several peers together; 0 if fewer than two were reached.

    1. All peers are pinged at the same time.
    2. One probe goes up and one comes down at a time, so that probes do not share this node's line. They never go to and from
      the same peer, where answers would wait behind the probe.
    3. Several probes go at a time, with peers on other machines if there are any. They show the speed of this machine's line.
    4. If the probes that go up share a line, answers to the probes that came down have waited behind them. So probes come down
      again, and nothing goes up.

    The remaining time is divided among the peers, with more for far ones. ``measured`` is told how many of the peers were
    measured alone, out of those that answer both directions.
    """
    done = count(1)
    probed = [_Probed(node, peer, dialler, lease) for peer in peers]
    try:
        await asyncio.gather(*(each.ping() for each in probed))
        reached = sorted((each for each in probed if not each.problem), key=lambda each: each.round_trip)
        until = time.perf_counter() + MEASURING_LEASES * lease

        async def probe_all(peers: Sequence[_Probed], direction: Callable[[_Probed], _Direction]) -> None:
            needed = sum(each.window for each in peers)
            for each in peers:
                async with each.busy:
                    if not each.problem:
                        seconds = (until - time.perf_counter()) * each.window / needed
                        await direction(each).measure(max(min(lease / 2, seconds), LEAST_WINDOWS * each.window))
                measured(next(done) // 2, len(reached))
                needed -= each.window

        half = len(reached) // 2
        others_first = reached[half:] + reached[:half]
        await asyncio.gather(probe_all(reached, lambda each: each.up), probe_all(others_first, lambda each: each.down))
        sound = [each for each in reached if not each.problem]
        some = ([each for each in sound if each.way != "loopback"] or sound)[:MEASURED_TOGETHER]
        up = await _together([each.up for each in some], lease)
        if 0 < up < SHARED_LINE * sum(each.up.bandwidth for each in some):
            left = until - time.perf_counter()
            least = accumulate(LEAST_WINDOWS * each.window for each in sound)
            again = [each for each, seconds in zip(sound, least, strict=True) if seconds < left]
            await asyncio.gather(*(each.renew_down() for each in again))
            await probe_all(again, lambda each: each.down)
        down = await _together([each.down for each in some if not each.problem], lease)
    finally:
        await asyncio.gather(*(direction.channel.close() for each in probed for direction in (each.up, each.down)))
    return LinkReport(links=[link for each in probed for link in each.report()], up=up, down=down)


async def _together(directions: Sequence[_Direction], lease: float) -> float:
    """Bytes per second while all of ``directions`` are busy; 0 if that cannot be told.

    They are kept busy for as long as the slowest measurement alone took, or until MOST_BYTES_TOGETHER have arrived. The second
    half of that time counts. The result is at least the speed of the fastest direction alone, and at most the sum of all.
    """
    if len(directions) < 2:
        return 0.0
    alone = [direction.bandwidth for direction in directions]
    arrivals = [Arrivals() for _ in directions]

    def enough(_: Arrivals) -> bool:
        return sum(each.totals[-1] for each in arrivals if each.totals) >= MOST_BYTES_TOGETHER

    async def keep_busy(direction: _Direction, arrived: Arrivals) -> None:
        while not enough(arrived):
            await _record(direction.probe(), arrived, enough)

    began = time.perf_counter()
    tasks = [asyncio.create_task(keep_busy(*each)) for each in zip(directions, arrivals, strict=True)]
    longest = min(max(direction.took for direction in directions), lease / 2)
    done, pending = await asyncio.wait(tasks, timeout=longest, return_when=asyncio.FIRST_COMPLETED)
    ended = time.perf_counter()
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    if any(task.exception() is not None for task in done):
        return 0.0  # each link alone is known, but not what they share
    rates = [each.rate((began + ended) / 2, ended) for each in arrivals]
    for direction, rate in zip(directions, rates, strict=True):
        if rate > HELD_UP * direction.bandwidth:
            direction.bandwidth = rate
    return min(max(*alone, sum(rates)), sum(direction.bandwidth for direction in directions))


async def _record(sizes: Sizes, arrivals: Arrivals, enough: Callable[[Arrivals], bool]) -> None:
    """Records arrivals until they are ``enough``."""
    async with aclosing(sizes):
        async for size in sizes:
            arrivals.add(time.perf_counter(), size)
            if enough(arrivals):
                return


class _Direction:
    """The link to a peer or from it: its bandwidth in bytes per second, and the seconds that the measurement ``took``.

    Each direction has a connection of its own. After a probe in one direction, the answers' long round trips make Linux's CUBIC
    take the link for full. A probe in the other direction on the same connection saw 1 to 5 % of links of 100 to 790 Mbit/s.
    """

    def __init__(self, probed: _Probed, name: str, probe: Callable[[Any], Sizes]) -> None:
        """``probe`` makes a probe by the method of this name."""
        self._probed = probed
        self.channel = probed.open()
        self.probe = partial(probe, partial(method(self.channel, name), timeout=probed.lease))
        self.bandwidth = 0.0
        self.took = 0.0

    async def measure(self, patience: float) -> None:
        """Sends one probe, for at most ``patience`` seconds."""
        round_trip, arrivals = self._probed.round_trip, Arrivals()
        began = time.perf_counter()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await _record(self.probe(), arrivals, lambda arrived: is_enough(arrived, round_trip))
            self.bandwidth = rate_of(arrivals, window_seconds(round_trip))
        except (grpc.aio.AioRpcError, ValueError) as error:
            self._probed.fail(error)
        self.took = time.perf_counter() - began


class _Probed:
    """One peer, and the facts about the links to it and from it."""

    def __init__(self, node: str, peer: Peer, dialler: Dialler, lease: float) -> None:
        self.lease = lease
        self._target = dialler.target(peer)
        self.open = partial(dialler.open, peer.node, self._target, lease, apart=True)
        self.up, self.down = _Direction(self, "Upload", send_probe), _Direction(self, "Download", receive_probe)
        self.busy = asyncio.Lock()
        self.problem = ""
        self.round_trip = 0.0
        self._node, self._peer = node, peer
        self.way = ""
        self._dialler = dialler

    async def ping(self) -> None:
        deadline = time.monotonic() + self.lease / 2
        trips = []
        there, back = method(self.up.channel, "Ping"), method(self.down.channel, "Ping")
        try:
            for first in (there, back):
                await first(b"", timeout=max(deadline - time.monotonic(), 0.001), wait_for_ready=True)
            for _ in range(PINGS):
                began = time.perf_counter()
                call = there(b"", timeout=max(deadline - time.monotonic(), 0.001))
                await call
                trips.append(time.perf_counter() - began)
            self.way = self._dialler.way(self._peer, await seen_as(call))
        except grpc.aio.AioRpcError as error:
            self.fail(error)
        else:
            self.round_trip = min(trips)

    async def renew_down(self) -> None:
        """Opens another connection for probes that come down. On a connection whose answers were held up, the peer stays slow
        for long."""
        await self.down.channel.close()
        self.down = _Direction(self, "Download", receive_probe)
        try:
            await method(self.down.channel, "Ping")(b"", timeout=self.lease / 2, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            self.fail(error)

    @property
    def window(self) -> float:
        return window_seconds(self.round_trip)

    def report(self) -> list[LinkReport.Link]:
        node, peer = self._node, self._peer.node
        return [
            LinkReport.Link(
                source=source,
                destination=destination,
                latency_seconds=self.round_trip / 2,
                bandwidth=0.0 if self.problem else direction.bandwidth,
                problem=self.problem,
                way=self.way if source == node else "",
            )
            for source, destination, direction in ((node, peer, self.up), (peer, node, self.down))
        ]

    def fail(self, error: grpc.aio.AioRpcError | ValueError) -> None:
        why = _sentence(error)
        self.problem = f"{self._target}: {why}"[:300]


async def reach(peers: Sequence[Peer], dialler: Dialler, lease: float) -> Reached:
    """Dials each peer. Says how each was reached, or why it was not reached within half a ``lease``."""

    async def dial(peer: Peer) -> Reached.Outcome:
        outcome = Reached.Outcome(node=peer.node)
        target = dialler.target(peer)
        async with dialler.open(peer.node, target, lease, apart=True) as channel:
            try:
                call = method(channel, "Ping")(b"", timeout=lease / 2, wait_for_ready=True)
                await call
                outcome.way = dialler.way(peer, await seen_as(call))
            except grpc.aio.AioRpcError as error:
                outcome.problem = f"{target}: {_sentence(error)}"[:300]
        return outcome

    return Reached(outcomes=await asyncio.gather(*map(dial, peers)))


def _sentence(error: grpc.aio.AioRpcError | ValueError) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)

"""Measures the links between this node and its peers, in both directions, and what they carry together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial

import grpc
import grpc.aio

from dtfm.node.host.bandwidth_probe import (
    MOST_BYTES,
    Arrivals,
    is_enough,
    rate_of,
    receive_burst,
    send_burst,
    window_seconds,
)
from dtfm.protos.connection import open_channel
from dtfm.protos.control_pb2 import LinkReport, Peer
from dtfm.protos.credentials import Identity, to_peer
from dtfm.protos.streams import download_call, ping_call, upload_call

PINGS = 5
MEASURING_LEASES = 4
"""One after the other, bursts take about so many leases at most; the coordinator waits for PROBE_LEASES."""
LEAST_WINDOWS = 2
"""A burst may last for so many windows even where no time is left."""
MOST_TOGETHER = 8
"""Bursts that go up, or come down, at the same time."""
MOST_BYTES_TOGETHER = 4 * MOST_BYTES
"""After which these end."""
HELD_UP = 2
"""A link that is so many times quicker beside others than it was by itself had been held up by something else."""

#: The sizes in bytes of what has arrived of a burst, when it does.
Sizes = AsyncGenerator[int, None]


async def measure_links(node: str, peers: Sequence[Peer], identity: Identity, lease: float) -> LinkReport:
    """For each peer the links node -> peer and peer -> node: one-way latency in seconds (half the shortest of some round trips)
    and bandwidth in bytes per second (see burst.py). A peer that does not answer within half a ``lease``, or of whose burst
    too little comes, has bandwidth 0 and its problem named. ``up`` and ``down``: bytes per second that go to, or come
    from, several peers together; 0 where fewer than two were reached.

    All peers at once say how far they are; then bursts go up and come down, one of each at a time, so that they do not share
    this node's link, and not with the same peer, where answers would wait behind bursts; then, to see what of that they do share,
    several at a time. Each may take its part of the time that is left, far ones more.
    """
    probed = [_Probed(node, peer, identity, lease) for peer in peers]
    try:
        await asyncio.gather(*(each.ping() for each in probed))
        reached = sorted((each for each in probed if not each.problem), key=lambda each: each.round_trip)

        async def bursts(peers: Sequence[_Probed], direction: Callable[[_Probed], _Direction]) -> None:
            until = time.perf_counter() + MEASURING_LEASES * lease
            needed = sum(each.window for each in peers)
            for each in peers:
                async with each.busy:
                    if not each.problem:
                        part = (until - time.perf_counter()) * each.window / needed
                        await direction(each).measure(max(min(lease / 2, part), LEAST_WINDOWS * each.window))
                needed -= each.window

        half = len(reached) // 2
        others_first = reached[half:] + reached[:half]
        await asyncio.gather(bursts(reached, lambda each: each.up), bursts(others_first, lambda each: each.down))
        some = [each for each in reached if not each.problem][:MOST_TOGETHER]
        up = await _together([each.up for each in some], lease)
        down = await _together([each.down for each in some], lease)
    finally:
        await asyncio.gather(*(direction.channel.close() for each in probed for direction in (each.up, each.down)))
    return LinkReport(links=[link for each in probed for link in each.report()], up=up, down=down)


async def _together(directions: Sequence[_Direction], lease: float) -> float:
    """Bytes per second while all of ``directions`` are busy; 0 where that cannot be told.

    They are for as long as the one that took longest by itself, or until MOST_BYTES_TOGETHER have come; what comes in the latter
    half of that time counts: no less than the fastest of them carries alone, and no more than all of them do.
    """
    if len(directions) < 2:
        return 0.0
    alone = [direction.bandwidth for direction in directions]
    arrivals = [Arrivals() for _ in directions]

    def enough(_: Arrivals) -> bool:
        return sum(heard.totals[-1] for heard in arrivals if heard.totals) >= MOST_BYTES_TOGETHER

    async def keep_busy(direction: _Direction, heard: Arrivals) -> None:
        while not enough(heard):
            await _hear(direction.burst(), heard, enough)

    began = time.perf_counter()
    tasks = [asyncio.create_task(keep_busy(*each)) for each in zip(directions, arrivals, strict=True)]
    longest = min(max(direction.took for direction in directions), lease / 2)
    done, pending = await asyncio.wait(tasks, timeout=longest, return_when=asyncio.FIRST_COMPLETED)
    ended = time.perf_counter()
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    if any(task.exception() is not None for task in done):
        return 0.0  # each link by itself is known; what they share is not
    rates = [heard.rate((began + ended) / 2, ended) for heard in arrivals]
    for direction, rate in zip(directions, rates, strict=True):
        if rate > HELD_UP * direction.bandwidth:
            direction.bandwidth = rate
    return min(max(*alone, sum(rates)), sum(direction.bandwidth for direction in directions))


async def _hear(sizes: Sizes, arrivals: Arrivals, enough: Callable[[Arrivals], bool]) -> None:
    """Notes what comes when, until it is ``enough``."""
    async with aclosing(sizes):
        async for size in sizes:
            arrivals.add(time.perf_counter(), size)
            if enough(arrivals):
                return


class _Direction:
    """To a peer, or from it: its bandwidth in bytes per second, and how many seconds it took to tell.

    Each has a connection of its own. On one on which a burst has come, the answers' round trips were so long that Linux's CUBIC
    takes the link for full: a burst the other way had 1 to 5 % of links of 100 to 790 Mbit/s.
    """

    def __init__(self, probed: _Probed, channel: grpc.aio.Channel, burst: Callable[[], Sizes]) -> None:
        self._probed = probed
        self.channel = channel
        self.burst = burst
        self.bandwidth = 0.0
        self.took = 0.0

    async def measure(self, patience: float) -> None:
        """With one burst, which lasts no longer than ``patience``."""
        round_trip, arrivals = self._probed.round_trip, Arrivals()
        began = time.perf_counter()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await _hear(self.burst(), arrivals, lambda heard: is_enough(heard, round_trip))
            self.bandwidth = rate_of(arrivals, window_seconds(round_trip))
        except (grpc.aio.AioRpcError, ValueError) as error:
            self._probed.broken(error)
        self.took = time.perf_counter() - began


class _Probed:
    """One peer, and what is known of the links to and from it."""

    def __init__(self, node: str, peer: Peer, identity: Identity, lease: float) -> None:
        there, back = (open_channel(peer.address, to_peer(identity, peer.node), lease, apart=True) for _ in range(2))
        upload, download = (partial(call, timeout=lease) for call in (upload_call(there), download_call(back)))
        self.up = _Direction(self, there, lambda: send_burst(upload, MOST_BYTES))
        self.down = _Direction(self, back, lambda: receive_burst(download))
        self.busy = asyncio.Lock()
        self.problem = ""
        self.round_trip = 0.0
        self._ends = node, peer.node
        self._address = peer.address
        self._lease = lease

    async def ping(self) -> None:
        deadline = time.monotonic() + self._lease / 2
        trips = []
        there, back = ping_call(self.up.channel), ping_call(self.down.channel)
        try:
            for first in (there, back):
                await first(b"", timeout=max(deadline - time.monotonic(), 0.001), wait_for_ready=True)
            for _ in range(PINGS):
                began = time.perf_counter()
                await there(b"", timeout=max(deadline - time.monotonic(), 0.001))
                trips.append(time.perf_counter() - began)
        except grpc.aio.AioRpcError as error:
            self.broken(error)
        else:
            self.round_trip = min(trips)

    @property
    def window(self) -> float:
        return window_seconds(self.round_trip)

    def report(self) -> list[LinkReport.Link]:
        node, peer = self._ends
        return [
            LinkReport.Link(
                source=source,
                destination=destination,
                latency_seconds=self.round_trip / 2,
                bandwidth=0.0 if self.problem else direction.bandwidth,
                problem=self.problem,
            )
            for source, destination, direction in ((node, peer, self.up), (peer, node, self.down))
        ]

    def broken(self, error: grpc.aio.AioRpcError | ValueError) -> None:
        why = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
        self.problem = f"{self._address}: {why}"[:300]

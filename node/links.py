"""Measures the links between this node and its peers, in both directions, and what they carry together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import grpc
import grpc.aio

from dtfm.protos.connection import open_channel
from dtfm.protos.control_pb2 import LinkReport, Peer
from dtfm.protos.credentials import Identity, to_peer
from dtfm.protos.streams import download_call, ping_call, upload_call

PINGS = 5
BURST_CHUNK_BYTES = 64 << 10
FIRST_BURST_BYTES = 4 * BURST_CHUNK_BYTES
LARGEST_BURST_BYTES = 16 << 20
MOST_BYTES_PER_SECOND = 1e13
BURST_SECONDS = 0.25
BURST_ROUND_TRIPS = 6
"""A burst should take so long, and so many round trips, lest it be all slow start: its size follows from a first, small one."""
MOST_TOGETHER = 8
"""Bursts that go up, or come down, at the same time."""
MOST_BYTES_TOGETHER = 4 * LARGEST_BURST_BYTES
LONGER_TOGETHER = 2
"""They take so many times as long as one by itself: here slow start counts, so that there should be little of it."""
HELD_UP = 2
"""A link that is so many times quicker beside others than it was by itself had been held up by something else."""


async def measure_links(node: str, peers: Sequence[Peer], identity: Identity, lease: float) -> LinkReport:
    """For each peer the links node -> peer and peer -> node: one-way latency in seconds (half the shortest of some round trips)
    and bandwidth in bytes per second (see late_rate). A peer that does not answer within half a ``lease``, or
    does not take a burst within one, has bandwidth 0 and its problem named. ``up`` and ``down``: bytes per second that go to, or
    come from, several peers together; 0 where fewer than two were reached.

    All peers at once say how far they are; then bursts go up and come down, one of each at a time, so that they do not share
    this node's link; then, to see what of that they do share, several at a time.
    """
    probed = [_Probed(node, peer, identity, lease) for peer in peers]
    try:
        await asyncio.gather(*(each.ping() for each in probed))

        async def bursts(measure: Callable[[_Probed], Awaitable[None]]) -> None:
            for each in probed:
                if not each.to_peer.problem:
                    await measure(each)

        await asyncio.gather(bursts(_Probed.upload), bursts(_Probed.download))
        reached = [each for each in probed if not each.to_peer.problem][:MOST_TOGETHER]
        up, down = await asyncio.gather(
            _together([each.to_peer for each in reached], [each.send for each in reached], lease),
            _together([each.from_peer for each in reached], [each.fetch for each in reached], lease),
        )
    finally:
        await asyncio.gather(*(each.channel.close() for each in probed))
    links = [link for each in probed for link in (each.to_peer, each.from_peer)]
    return LinkReport(links=links, up=up, down=down)


async def _together(
    links: Sequence[LinkReport.Link], bursts: Sequence[Callable[[int], Awaitable[float]]], lease: float
) -> float:
    """Bytes per second while all ``links`` are busy; 0 where that cannot be told within a ``lease``.

    Each gets a burst as large as it alone would carry in the same time. All bytes over the whole time, slow start included, are
    too little rather than too much; but no less than the fastest link carries alone, and no more than all of them do (the pings
    may have been slower than the bursts).
    """
    if len(links) < 2:
        return 0.0
    patience = LONGER_TOGETHER * max(burst_seconds(2 * link.latency_seconds) for link in links)
    patience = min(patience, lease / 2 / len(links))  # where they share one line, it takes that many times as long
    seconds = min(patience, MOST_BYTES_TOGETHER / sum(link.bandwidth for link in links))
    sizes = [whole_chunks(link.bandwidth * seconds) for link in links]

    async def timed(link: LinkReport.Link, size: int, burst: Callable[[int], Awaitable[float]]) -> float:
        began = time.perf_counter()
        speed = await burst(size)
        seconds = time.perf_counter() - began - 2 * link.latency_seconds
        if speed > HELD_UP * link.bandwidth:
            link.bandwidth = speed
        return seconds

    try:
        took = await asyncio.gather(*(timed(*each) for each in zip(links, sizes, bursts, strict=True)))
    except (grpc.aio.AioRpcError, ValueError):
        return 0.0  # each link by itself is known; what they share is not
    alone = [link.bandwidth for link in links]
    return min(max(*alone, sum(sizes) / max(*took, 1e-6)), sum(alone))


class _Probed:
    """One peer, and what is known of the links to and from it."""

    def __init__(self, node: str, peer: Peer, identity: Identity, lease: float) -> None:
        self.channel = open_channel(peer.address, to_peer(identity, peer.node), lease)
        self.to_peer = LinkReport.Link(source=node, destination=peer.node)
        self.from_peer = LinkReport.Link(source=peer.node, destination=node)
        self._address = peer.address
        self._lease = lease

    async def ping(self) -> None:
        ping = ping_call(self.channel)
        deadline = time.monotonic() + self._lease / 2
        try:
            await ping(b"", timeout=self._lease / 2, wait_for_ready=True)
            trips = []
            for _ in range(PINGS):
                began = time.perf_counter()
                await ping(b"", timeout=max(deadline - time.monotonic(), 0.001))
                trips.append(time.perf_counter() - began)
        except grpc.aio.AioRpcError as error:
            self._broken(error)
        else:
            self.to_peer.latency_seconds = self.from_peer.latency_seconds = min(trips) / 2

    async def upload(self) -> None:
        await self._measure(self.to_peer, self.send)

    async def download(self) -> None:
        await self._measure(self.from_peer, self.fetch)

    async def send(self, size: int) -> float:
        """A burst to the peer: the bytes per second at which it came there."""
        answer = await upload_call(self.channel)(_burst(size), timeout=self._lease)
        speed = float(answer)
        if not 0 < speed < MOST_BYTES_PER_SECOND:  # NaN too
            raise ValueError(f"the peer says that the burst came at {speed} bytes per second")
        return speed

    async def fetch(self, size: int) -> float:
        """A burst from the peer."""
        chunks = download_call(self.channel)(str(size).encode(), timeout=self._lease)
        return await pace(chunks)

    async def _measure(self, link: LinkReport.Link, burst: Callable[[int], Awaitable[float]]) -> None:
        try:
            first = await burst(FIRST_BURST_BYTES)
            bandwidth = await burst(burst_bytes(first, 2 * link.latency_seconds))
        except (grpc.aio.AioRpcError, ValueError) as error:
            self._broken(error)
        else:
            link.bandwidth = bandwidth if not link.problem else 0

    def _broken(self, error: grpc.aio.AioRpcError | ValueError) -> None:
        why = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
        for link in (self.to_peer, self.from_peer):
            link.bandwidth = 0
            link.problem = f"{self._address}: {why}"[:300]


async def pace(chunks: AsyncIterator[bytes]) -> float:
    """Bytes per second at which the chunks came, see late_rate. Raises ValueError when there are fewer than two."""
    began = time.perf_counter()
    arrivals = [(time.perf_counter() - began, len(chunk)) async for chunk in chunks]
    if len(arrivals) < 2:
        raise ValueError(f"a burst came in {len(arrivals)} pieces; it takes two to tell how quickly")
    return late_rate(arrivals)


def late_rate(arrivals: Sequence[tuple[float, int]]) -> float:
    """Bytes per second in the latter half of the time that a burst took; ``arrivals``: seconds since it began, and bytes.

    The first half is slow start. Half of the time and not of the bytes: whatever came behind a lost packet is handed over in
    the instant in which that is there again, and would seem to have taken none.
    """
    middle, last = arrivals[-1][0] / 2, 0.0
    late = 0.0
    for at, size in arrivals:
        if at > middle:  # a chunk that was under way in the middle counts in part
            late += size * min(1.0, (at - middle) / max(at - last, 1e-9))
        last = at
    return late / max(middle, 1e-6)


def burst_bytes(bytes_per_second: float, round_trip: float) -> int:
    """How large a burst takes long enough to tell the bandwidth of a link that seems to have this one; whole chunks."""
    return whole_chunks(min(bytes_per_second * burst_seconds(round_trip), LARGEST_BURST_BYTES))


def burst_seconds(round_trip: float) -> float:
    """How long a burst should take."""
    return max(BURST_SECONDS, BURST_ROUND_TRIPS * round_trip)


def whole_chunks(size: float) -> int:
    """About ``size`` bytes, as a burst has them."""
    return max(round(size / BURST_CHUNK_BYTES) * BURST_CHUNK_BYTES, FIRST_BURST_BYTES)


async def _burst(size: int) -> AsyncIterator[bytes]:
    chunk = bytes(BURST_CHUNK_BYTES)
    for start in range(0, size, BURST_CHUNK_BYTES):
        yield chunk[: size - start]

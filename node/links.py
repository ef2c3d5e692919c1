"""Measures the links between this node and its peers, in both directions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from dtfm.protos.connection import Metadata, open_channel
from dtfm.protos.control_pb2 import LinkReport, Peer
from dtfm.protos.frame import CHUNK_BYTES
from dtfm.protos.streams import download_call, ping_call, upload_call

PINGS = 5
BURST_SECONDS = 0.25
"""What a burst should take: its size follows from a first, small one."""
FIRST_BURST_BYTES = 256 << 10
LARGEST_BURST_BYTES = 16 << 20


async def measure_links(node: str, peer: Peer, metadata: Metadata, timeout: float) -> list[LinkReport.Link]:
    """The links node -> peer and peer -> node: one-way latency in seconds (half the shortest of some round trips) and
    bandwidth in bytes per second (a timed burst). A peer that does not answer within ``timeout`` seconds has bandwidth 0
    and its problem named."""
    to_peer = LinkReport.Link(source=node, destination=peer.node)
    from_peer = LinkReport.Link(source=peer.node, destination=node)
    deadline = time.monotonic() + timeout

    def left() -> float:
        return max(deadline - time.monotonic(), 0.001)

    async with open_channel(peer.address) as channel:
        try:
            ping = ping_call(channel)
            await ping(b"", metadata=metadata, timeout=left(), wait_for_ready=True)
            trips = []
            for _ in range(PINGS):
                began = time.perf_counter()
                await ping(b"", metadata=metadata, timeout=left())
                trips.append(time.perf_counter() - began)
            to_peer.latency_seconds = from_peer.latency_seconds = min(trips) / 2

            async def upload(size: int) -> float:
                began = time.perf_counter()
                await upload_call(channel)(_burst(size), metadata=metadata, timeout=left())
                return time.perf_counter() - began

            async def download(size: int) -> float:
                began = time.perf_counter()
                async for _ in download_call(channel)(str(size).encode(), metadata=metadata, timeout=left()):
                    pass
                return time.perf_counter() - began

            for link, transfer in ((to_peer, upload), (from_peer, download)):
                seconds = await transfer(FIRST_BURST_BYTES)
                size = burst_bytes(FIRST_BURST_BYTES, seconds)
                # The round trip that starts and ends a burst is no part of its bandwidth.
                link.bandwidth = size / max(await transfer(size) - min(trips), 1e-6)
        except grpc.aio.AioRpcError as error:
            for link in (to_peer, from_peer):
                link.bandwidth = 0
                link.problem = f"{peer.address}: {error.code().name}: {error.details()}"[:300]
    return [to_peer, from_peer]


def burst_bytes(first_bytes: int, first_seconds: float) -> int:
    """How large a burst takes about BURST_SECONDS, judging from a first one; whole chunks, within bounds."""
    wanted = first_bytes / max(first_seconds, 1e-6) * BURST_SECONDS
    chunks = round(min(wanted, LARGEST_BURST_BYTES) / CHUNK_BYTES)
    return max(chunks, 1) * CHUNK_BYTES


async def _burst(size: int) -> AsyncIterator[bytes]:
    chunk = bytes(min(size, CHUNK_BYTES))
    for start in range(0, size, CHUNK_BYTES):
        yield chunk[: size - start]

"""Where a node gets the state of its buckets: from itself, from the replicas, from the checkpoint, or from the seed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from dtfm.node.bucket import Bucket
from dtfm.protos.connection import Metadata, open_channel
from dtfm.protos.control_pb2 import Peer
from dtfm.protos.frame import FrameError, FrameProblem, Header, Kind, parse
from dtfm.protos.peer_pb2 import StateRequest
from dtfm.protos.streams import state_call

RETRY_SECONDS = 0.2


async def fetch_state(
    bucket: Bucket, total: int, step: int, generation: int, donors: list[Peer], metadata: Metadata, patience: float
) -> None:
    """Fills ``bucket`` (``total`` bytes of state) with its state as of ``step`` from whichever of ``donors`` has it.

    A broken transfer goes on at the next donor from the byte where it stopped. A donor may still be applying ``step``; so
    they are asked again until nothing has come for ``patience`` seconds. Raises ConnectionError naming the last problem.
    """
    have, heard = 0, time.monotonic()
    problem = "nobody has it"
    while time.monotonic() < heard + patience:
        for donor in donors:
            request = StateRequest(generation=generation, step=step, bucket=bucket.spec.index, offset=have)
            try:
                async with open_channel(donor.address) as channel, asyncio.timeout(patience) as silence:
                    frames = state_call(channel)(request.SerializeToString(), metadata=metadata)
                    async for payload in _payloads(frames, bucket.spec.index, step, total - have):
                        bucket.load(payload, have)
                        have, heard = have + len(payload), time.monotonic()
                        silence.reschedule(asyncio.get_running_loop().time() + patience)
                if have == total:
                    return
                problem = f"{donor.node} ended after {have} of {total} bytes"
            except TimeoutError:
                problem = f"{donor.node} at {donor.address} sent nothing for {patience:.0f} s"
            except grpc.aio.AioRpcError as error:
                problem = f"{donor.node} at {donor.address}: {error.code().name}: {error.details()}"
            except FrameError as error:
                problem = f"{donor.node} sent a frame that is refused: {error}"
        await asyncio.sleep(RETRY_SECONDS)
    raise ConnectionError(f"bucket {bucket.spec.index} as of step {step} could not be had: {problem}")


async def _payloads(frames: AsyncIterator[bytes], bucket: int, step: int, left: int) -> AsyncIterator[memoryview]:
    """The pieces of the ``left`` bytes that are asked for. Raises FrameError for a frame that is not the next piece."""
    received = 0
    async for frame in frames:
        header, payload = parse(frame)
        wanted = (Kind.STATE, bucket, step, left, received)
        if (header.kind, header.index, header.step, header.total, header.offset) != wanted:
            raise FrameError(FrameProblem.UNEXPECTED, f"{header.kind.name} {header.index} of step {header.step}")
        received += len(payload)
        yield payload


def state_header(request: StateRequest, size: int) -> Header:
    """The header under which ``size`` bytes of state travel: from the asked-for offset to the end."""
    return Header(Kind.STATE, 0, 0, request.generation, request.step, request.bucket, 0, size, size)

"""State from peers: many donors at once, resumed at the next one where one breaks off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from dtfm.node.trace import Activity, span
from dtfm.protos.connection import open_channel
from dtfm.protos.control_pb2 import Peer
from dtfm.protos.credentials import Identity, to_peer
from dtfm.protos.frame import FrameError, FrameProblem, Kind, parse
from dtfm.protos.peer_pb2 import StateRequest
from dtfm.protos.streams import state_call

RETRY_SECONDS = 0.2
ASKED_AT_ONCE = 2
"""Buckets of one donor: while one is on its way the next one is asked for, so that the link never waits for a round trip."""


async def as_it_is() -> str:
    """There is nothing to check in what came."""
    return ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A bucket's state of so many bytes, from the memory of any of ``donors``, or from their ``backup`` on disk. ``take`` gets
    it piece by piece, each with its offset; then ``finish`` says what is wrong with it: it comes anew then, from another one.
    Empty: nothing is."""

    bucket: int
    size_bytes: int
    donors: Sequence[Peer]
    take: Callable[[memoryview, int], None]
    finish: Callable[[], Awaitable[str]] = as_it_is
    backup: bool = False


async def fetch(wanted: Sequence[Wanted], step: int, generation: int, identity: Identity, patience: float) -> None:
    """Gets each bucket's state as of ``step`` from its own donors, all donors at once: who is done with one bucket gives the
    next.

    A broken transfer goes on at the next donor from the byte where it stopped. A donor may still be applying ``step``; so
    they are asked again until nothing has come for ``patience`` seconds. Raises ConnectionError naming the last problem, and the
    OSError or ValueError of a ``finish``.
    """
    if alone := next((item for item in wanted if not item.donors), None):
        raise ConnectionError(f"nobody who is known has bucket {alone.bucket} as of step {step}")
    left = sorted(wanted, key=lambda item: -item.size_bytes)
    donors = {donor.node: donor for item in wanted for donor in item.donors}
    channels = {name: open_channel(donor.address, to_peer(identity, name), patience) for name, donor in donors.items()}

    async def serve(donor: Peer) -> None:
        while (item := next((item for item in left if donor in item.donors), None)) is not None:
            left.remove(item)
            in_turn = [donor, *(other for other in item.donors if other != donor)]
            with span(Activity.FETCH, step, item.bucket, f"state from {donor.node}"):
                await _fetch_one(item, step, generation, in_turn, channels, patience)

    try:
        async with asyncio.TaskGroup() as group:
            for donor in [*donors.values()] * ASKED_AT_ONCE:
                group.create_task(serve(donor))
    except* (OSError, ValueError) as problems:
        raise problems.exceptions[0] from None
    finally:
        await asyncio.gather(*(channel.close() for channel in channels.values()))


async def _fetch_one(
    wanted: Wanted,
    step: int,
    generation: int,
    donors: list[Peer],
    channels: Mapping[str, grpc.aio.Channel],
    patience: float,
) -> None:
    """One bucket of ``fetch``, from whichever of ``donors`` has it."""
    have, heard = 0, time.monotonic()
    gave: list[Peer] = []  # what has come so far
    problem = "nobody has it"
    while donors and time.monotonic() < heard + patience:
        for donor in list(donors):
            request = StateRequest(
                generation=generation, step=step, bucket=wanted.bucket, offset=have, backup=wanted.backup
            )
            try:
                async with asyncio.timeout(patience) as silence:
                    frames = state_call(channels[donor.node])(request.SerializeToString())
                    async for payload in _payloads(frames, wanted.bucket, step, wanted.size_bytes - have):
                        wanted.take(payload, have)
                        if donor not in gave:
                            gave.append(donor)
                        have, heard = have + len(payload), time.monotonic()
                        silence.reschedule(asyncio.get_running_loop().time() + patience)
                if have < wanted.size_bytes:
                    problem = f"{donor.node} ended after {have} of {wanted.size_bytes} bytes"
                elif wrong := await wanted.finish():
                    problem, have = f"{gave[0].node}: {wrong}", 0
                    donors.remove(gave[0])  # who broke off, if anybody did
                    gave.clear()
                    break
                else:
                    return
            except TimeoutError:
                problem = f"{donor.node} at {donor.address} sent nothing for {patience:.0f} s"
            except grpc.aio.AioRpcError as error:
                problem = f"{donor.node} at {donor.address}: {error.code().name}: {error.details()}"
            except FrameError as error:
                problem = f"{donor.node} sent a frame that is refused: {error}"
        await asyncio.sleep(RETRY_SECONDS)
    raise ConnectionError(f"bucket {wanted.bucket} as of step {step} could not be had: {problem}")


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

"""State from peers: from many donors at once, resumed at the next donor when one breaks off."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio

from dtfm.node.host.trace import Activity, span
from dtfm.node.host.work import WORK
from dtfm.node.network.dialling import Dialler, Lost
from dtfm.node.state.gathered import Gathered, Take
from dtfm.protos.control_pb2 import Peer
from dtfm.protos.frame import FrameError, FrameProblem, Kind, parse
from dtfm.protos.peer_pb2 import StateRequest
from dtfm.protos.streams import method

RETRY_SECONDS = 0.2
"""Seconds between two rounds of asking all donors of a bucket."""
ASKED_AT_ONCE = 2
"""Buckets that one donor is asked for at a time: the link need not wait a round trip between them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A bucket's state of ``size_bytes``, from the memory of any of ``donors`` or, with ``from_snapshot``, from their disks.

    ``take`` gets the pieces, in a thread (see Gathered). At the end ``finish``, in a thread too, returns an error in the
    whole, or "" if it is good. After an error the bucket is fetched again from another donor. ``shared``: the part that all
    islands have the same. ``begin``: the first wanted byte of the state. ``frozen``: not a bucket's state, but the frozen
    weights of the layer of that number.
    """

    bucket: int
    size_bytes: int
    donors: Sequence[Peer]
    take: Take
    finish: Callable[[], str] = lambda: ""
    from_snapshot: bool = False
    shared: bool = False
    frozen: bool = False
    begin: int = 0


async def fetch(
    wanted: Sequence[Wanted], step: int, generation: int, dialler: Dialler, patience: float
) -> Mapping[int, tuple[str, ...]]:
    """Fetches each bucket's state as of ``step`` from its own donors, all donors at once; an idle donor gets the next bucket.

    A broken transfer goes on at the next donor from the byte where it stopped. A donor is given up when nothing has come from
    anybody for ``patience`` seconds: the slow part may be the link that all share. A donor without the state is asked again
    for as long, since it may still be applying ``step``. Returns by bucket who gave it, more than one if a transfer broke.

    Raises:
        Lost: a bucket's donors are out of reach or do not have it; names the last of them, and its problem.
        ValueError: every donor of a bucket sent data that ``finish`` refused.
        What a ``finish`` raises.
    """
    if alone := next((item for item in wanted if not item.donors), None):
        raise ConnectionError(f"no known node has bucket {alone.bucket} as of step {step}")
    left = sorted(wanted, key=lambda item: -item.size_bytes)
    donors = {donor.node: donor for item in wanted for donor in item.donors}
    channels = {name: dialler.open(name, dialler.target(donor), patience) for name, donor in donors.items()}
    silence = _Silence(patience)
    gave: dict[int, tuple[str, ...]] = {}

    async def serve(donor: Peer) -> None:
        while (item := next((item for item in left if donor in item.donors), None)) is not None:
            left.remove(item)
            order = [donor, *(other for other in item.donors if other != donor)]
            with span(Activity.FETCH, step, item.bucket, f"state from {donor.node}"):
                gave[item.bucket] = await _fetch_one(item, step, generation, order, channels, silence)

    try:
        async with asyncio.TaskGroup() as group:
            for donor in [*donors.values()] * ASKED_AT_ONCE:
                group.create_task(serve(donor))
    except* Exception as problems:
        raise problems.exceptions[0] from None
    finally:
        await asyncio.gather(*(channel.close() for channel in channels.values()))
    return gave


class _Silence:
    """Ends waiting streams when nothing has come on any of them for ``patience`` seconds."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._streams: set[asyncio.Timeout] = set()
        self._broken = 0.0

    @asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """A context to read one stream in. Raises TimeoutError."""
        async with asyncio.timeout(self.patience) as stream:
            self._streams.add(stream)
            try:
                yield
            finally:
                self._streams.discard(stream)

    def end(self) -> None:
        """To be called when something has come on any stream."""
        now = asyncio.get_running_loop().time()
        if now < self._broken + self.patience / 16:  # on a fast link, once per many frames
            return
        self._broken = now
        for stream in self._streams:
            if not stream.expired():
                stream.reschedule(now + self.patience)


async def _fetch_one(
    wanted: Wanted,
    step: int,
    generation: int,
    donors: list[Peer],
    channels: Mapping[str, grpc.aio.Channel],
    silence: _Silence,
) -> tuple[str, ...]:
    """Fetches one bucket from the first of ``donors`` that has it. Returns who gave it."""
    come, until = Gathered(wanted.take), math.inf  # until: when to give up unless something comes before
    gave: list[Peer] = []  # the donors of the bytes received so far
    problem = "no node has it"
    while donors and time.monotonic() < until:
        for donor in list(donors):
            request = StateRequest(
                generation=generation,
                step=step,
                bucket=wanted.bucket,
                offset=wanted.begin + come.have,
                from_snapshot=wanted.from_snapshot,
                shared=wanted.shared,
                frozen=wanted.frozen,
                end=wanted.begin + wanted.size_bytes if wanted.begin else 0,
            )
            try:
                async with silence.bounded():
                    frames = method(channels[donor.node], "State")(request.SerializeToString())
                    async for payload in _payloads(frames, wanted.bucket, step, wanted.size_bytes - come.have):
                        if donor not in gave:
                            gave.append(donor)
                        await come.add(payload)
                        WORK.did()
                        until = math.inf
                        silence.end()
                await come.flush()
                if come.have < wanted.size_bytes:
                    problem = f"{donor.node} ended after {come.have} of {wanted.size_bytes} bytes"
                elif wrong := await asyncio.to_thread(wanted.finish):
                    problem = f"{gave[0].node}: {wrong}"
                    come.begin_again()
                    donors.remove(gave[0])  # the first of them, if it broke off
                    gave.clear()
                    break
                else:
                    return tuple(donor.node for donor in gave)
            except TimeoutError:
                problem = f"{donor.node} sent nothing for {silence.patience:.0f} s"
                until = time.monotonic()
            except grpc.aio.AioRpcError as error:
                problem = f"{donor.node}: {error.code().name}: {error.details()}"
                if wanted.from_snapshot and error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    donors.remove(donor)  # a file that is missing now stays missing
            except FrameError as error:
                problem = f"{donor.node} sent a frame that is refused: {error}"
            until = min(until, time.monotonic() + silence.patience)
        await asyncio.sleep(RETRY_SECONDS)
    what = f"frozen layer {wanted.bucket}" if wanted.frozen else f"bucket {wanted.bucket} as of step {step}"
    sentence = f"{what} could not be fetched: {problem}"
    raise Lost(donors[-1].node, sentence) if donors else ValueError(sentence)


async def _payloads(frames: AsyncIterator[bytes], bucket: int, step: int, left: int) -> AsyncIterator[memoryview]:
    """The pieces of the ``left`` requested bytes. Raises FrameError for a frame that is not the next piece."""
    received = 0
    async for frame in frames:
        header, payload = parse(frame)
        wanted = (Kind.STATE, bucket, step, left, received)
        if (header.kind, header.index, header.step, header.total, header.offset) != wanted:
            raise FrameError(FrameProblem.UNEXPECTED, f"{header.kind.name} {header.index} of step {header.step}")
        received += len(payload)
        yield payload

"""Where a node gets the state of its buckets: from itself, from the replicas, from the checkpoint, or from the seed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import torch

from dtfm.node.bucket import Bucket, bucket_bytes
from dtfm.node.checkpoint import read_bucket
from dtfm.node.model import Model
from dtfm.node.profile import run_dtype
from dtfm.node.stage import Stage, build_stage, initialise
from dtfm.node.trace import Activity, span
from dtfm.protos.connection import Metadata, open_channel
from dtfm.protos.control_pb2 import Assignment, Peer
from dtfm.protos.frame import FrameError, FrameProblem, Header, Kind, parse
from dtfm.protos.peer_pb2 import StateRequest
from dtfm.protos.plan_pb2 import BF16, Run
from dtfm.protos.streams import state_call

RETRY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Held:
    """State that a node has in memory: buckets by index, as of after ``step``."""

    step: int
    buckets: Mapping[int, Bucket]


def donate(held: Held, request: StateRequest) -> tuple[Header, memoryview]:
    """The asked-for bucket's state from the asked-for byte on, copied. Raises LookupError saying what is held instead."""
    if held.step != request.step or request.bucket not in held.buckets:
        raise LookupError(
            f"bucket {request.bucket} as of step {request.step} is not held here, but buckets {sorted(held.buckets)} as of "
            f"{held.step}"
        )
    pieces, skip = [], request.offset
    for piece in held.buckets[request.bucket].export():
        pieces.append(piece[min(skip, len(piece)) :])
        skip -= min(skip, len(piece))
    state = b"".join(pieces)
    return state_header(request, len(state)), memoryview(state)


def acquire_stage(
    node: str,
    run: Run,
    model: Model,
    device: torch.device,
    held: Held,
    assignment: Assignment,
    layers: tuple[int, int],
    metadata: Metadata,
    wait: Callable[[Coroutine[Any, Any, None]], None],
) -> Stage:
    """``node``'s stage of ``layers`` with its state as of ``assignment.step``.

    A bucket comes from ``held`` where the coordinator counts on that, else from its donors, else from the checkpoint, else, at
    step 0, from the seed. ``wait`` runs a coroutine on the event loop and returns when it is done. Raises ValueError,
    ConnectionError or OSError.
    """
    donors = [list(d.nodes) for d in assignment.donors] or [[] for _ in model.layers]
    mine = {
        index: bucket
        for index, bucket in held.buckets.items()
        if held.step == assignment.step and any(node in donors[layer] for layer in bucket.spec.layers)
    }
    autocast = run.train.precision == BF16
    stage = build_stage(model, *layers, device, run_dtype(run), autocast=autocast, held=mine)
    addresses = {peer.node: peer for peer in assignment.peers}
    for index, bucket in stage.buckets.items():
        if index in mine:
            continue
        names = dict.fromkeys(n for layer in bucket.spec.layers for n in donors[layer] if n != node)
        others = [addresses[name] for name in names if name in addresses]
        if others:
            generation = assignment.plan.generation
            with span(Activity.FETCH, assignment.step, index):
                wait(fetch_state(bucket, assignment.step, generation, others, metadata, run.lease_seconds))
        elif assignment.checkpoint:
            read_bucket(assignment.checkpoint, bucket)
        elif assignment.step == 0:
            initialise(model, bucket, run.seed)
        else:
            raise ValueError(f"nobody has the state of bucket {index} as of step {assignment.step}")
    return stage


async def fetch_state(
    bucket: Bucket, step: int, generation: int, donors: list[Peer], metadata: Metadata, patience: float
) -> None:
    """Fills ``bucket`` with its state as of ``step`` from whichever of ``donors`` has it.

    A broken transfer goes on at the next donor from the byte where it stopped. A donor may still be applying ``step``; so
    they are asked again until nothing has come for ``patience`` seconds. Raises ConnectionError naming the last problem.
    """
    total = bucket_bytes(bucket.spec, bucket.parameters.dtype)
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

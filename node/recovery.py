"""Where a node gets the state of its buckets: from itself, from the replicas, from the checkpoint, or from the seed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
import torch

from dtfm.node.bucket import Bucket, bucket_bytes
from dtfm.node.checkpoint import read_bucket
from dtfm.node.holding import Held
from dtfm.node.model import Model
from dtfm.node.profile import run_dtype
from dtfm.node.stage import Stage, build_stage, initialise
from dtfm.node.trace import Activity, span
from dtfm.protos.connection import open_channel
from dtfm.protos.control_pb2 import Assignment, Peer
from dtfm.protos.credentials import Identity, to_peer
from dtfm.protos.frame import FrameError, FrameProblem, Kind, parse
from dtfm.protos.peer_pb2 import StateRequest
from dtfm.protos.plan_pb2 import BF16, Run
from dtfm.protos.streams import state_call

RETRY_SECONDS = 0.2
ASKED_AT_ONCE = 2
"""Buckets of one donor: while one is on its way the next one is asked for, so that the link never waits for a round trip."""


def acquire_stage(
    node: str,
    run: Run,
    model: Model,
    device: torch.device,
    held: Held,
    copied: Mapping[int, Bucket],
    assignment: Assignment,
    layers: tuple[int, int],
    identity: Identity,
    wait: Callable[[Coroutine[Any, Any, None]], None],
) -> Stage:
    """``node``'s stage of ``layers`` with its state as of ``assignment.step``.

    A bucket comes from ``held`` where the coordinator counts on that, else from what was ``copied`` in advance, else from its
    donors, else from the checkpoint, else, at step 0, from the seed. ``wait`` runs a coroutine on the event loop and returns
    when it is done. Raises ValueError, ConnectionError or OSError.
    """
    donors = [list(d.nodes) for d in assignment.donors] or [[] for _ in model.layers]
    mine = dict(copied) | {
        index: bucket
        for index, bucket in held.buckets.items()
        if held.step == assignment.step and any(node in donors[layer] for layer in bucket.spec.layers)
    }
    autocast = run.train.precision == BF16
    stage = build_stage(model, *layers, device, run_dtype(run), autocast=autocast, held=mine)
    addresses = {peer.node: peer for peer in assignment.peers}
    from_peers: list[tuple[Bucket, list[Peer]]] = []
    for index, bucket in stage.buckets.items():
        if index in mine:
            continue
        names = dict.fromkeys(n for layer in bucket.spec.layers for n in donors[layer] if n != node)
        others = [addresses[name] for name in names if name in addresses]
        if others:
            from_peers.append((bucket, others))
        elif assignment.checkpoint:
            read_bucket(assignment.checkpoint, bucket)
        elif assignment.step == 0:
            initialise(model, bucket, run.seed)
        else:
            raise ValueError(f"nobody has the state of bucket {index} as of step {assignment.step}")
    if from_peers:
        wait(fetch_states(from_peers, assignment.step, assignment.plan.generation, identity, run.lease_seconds))
    return stage


async def fetch_states(
    wanted: Sequence[tuple[Bucket, Sequence[Peer]]], step: int, generation: int, identity: Identity, patience: float
) -> None:
    """Fills buckets with their state as of ``step``, each from its own donors, all donors at once: who is done with one bucket
    gives the next.

    A broken transfer goes on at the next donor from the byte where it stopped. A donor may still be applying ``step``; so
    they are asked again until nothing has come for ``patience`` seconds. Raises ConnectionError naming the last problem.
    """
    left = sorted(wanted, key=lambda item: -item[0].spec.size)
    donors = {donor.node: donor for _, peers in wanted for donor in peers}
    channels = {name: open_channel(donor.address, to_peer(identity, name), patience) for name, donor in donors.items()}

    async def serve(donor: Peer) -> None:
        while (item := next((item for item in left if donor in item[1]), None)) is not None:
            left.remove(item)
            bucket, holders = item
            in_turn = [donor, *(other for other in holders if other != donor)]
            with span(Activity.FETCH, step, bucket.spec.index, f"state from {donor.node}"):
                await _fetch_state(bucket, step, generation, in_turn, channels, patience)

    try:
        async with asyncio.TaskGroup() as group:
            for donor in [*donors.values()] * ASKED_AT_ONCE:
                group.create_task(serve(donor))
    except* ConnectionError as problems:
        raise problems.exceptions[0] from None
    finally:
        await asyncio.gather(*(channel.close() for channel in channels.values()))


async def _fetch_state(
    bucket: Bucket,
    step: int,
    generation: int,
    donors: Sequence[Peer],
    channels: Mapping[str, grpc.aio.Channel],
    patience: float,
) -> None:
    """One bucket of ``fetch_states``, from whichever of ``donors`` has it."""
    total = bucket_bytes(bucket.spec, bucket.parameters.dtype)
    have, heard = 0, time.monotonic()
    problem = "nobody has it"
    while time.monotonic() < heard + patience:
        for donor in donors:
            request = StateRequest(generation=generation, step=step, bucket=bucket.spec.index, offset=have)
            try:
                async with asyncio.timeout(patience) as silence:
                    frames = state_call(channels[donor.node])(request.SerializeToString())
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

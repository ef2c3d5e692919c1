"""One of the replicas that reduce.py measures: ``python -m tests.bench.reduce_end WAY RANK PORT ADDRESS...``, one per rank.

WAY is "gloo", "hivemind" or "hivemind-8bit" (with an interpreter that has it), or the name of a codec of ours. The process
prints a line when others can connect to it, and another when it is connected. Then, for each line that it reads, it sums BUCKETS
tensors with the other replicas and prints the largest relative error. They have REDUCE_ELEMENTS elements each, by default
1,048,576, and are filled before the line comes. Each way imports what it needs, as the interpreter that has hivemind may lack the
rest.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

BUCKETS, BUCKET_ELEMENTS = 8, int(os.environ.get("REDUCE_ELEMENTS", 1 << 20))
DEVICE = "wan0"
HIVEMIND_SECONDS = 300
"""A replica gives up after this time: over slow lines a group may never form."""

Reduce = Callable[[list[torch.Tensor]], Awaitable[None]]


def gradients_of(rank: int, turn: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return [torch.randn(BUCKET_ELEMENTS, generator=generator) for _ in range(BUCKETS)]


def error_of(tensors: list[torch.Tensor], ranks: int, turn: int) -> float:
    """The error of the first of ``tensors``: the norm of its difference from the sum, over the norm of the sum."""
    expected = torch.stack([gradients_of(rank, turn)[0] for rank in range(ranks)]).sum(0)
    return float(torch.linalg.vector_norm(tensors[0] - expected) / torch.linalg.vector_norm(expected))


async def heard() -> str:
    return await asyncio.to_thread(sys.stdin.readline)


def say(text: str) -> None:
    print(text, flush=True)


async def ours(codec_name: str, rank: int, port: int, addresses: list[str]) -> Reduce:
    from dtfm.kernels.codec import codec_named
    from dtfm.node.host.device import keep_freed_memory
    from dtfm.node.model.bucket import BucketSpec
    from dtfm.node.model.placement import placement_of
    from dtfm.node.network.dialling import Dialler
    from dtfm.node.state.state_store import StateStore
    from dtfm.node.training.reduction.reducer import Final, Reducer
    from dtfm.node.transport.frame_validation import Expectations, TensorSizes
    from dtfm.node.transport.peer_server import PeerServer
    from dtfm.node.transport.receiver import Receiver
    from dtfm.node.transport.send_priority import Rank
    from dtfm.node.transport.sender import Sender
    from dtfm.scheduler.model.plan import Plan, Stage
    from tests.protos.members import member

    keep_freed_memory()
    names = [f"n{number}" for number in range(len(addresses))]
    plan = Plan(1, (Stage((0, BUCKETS), tuple(names), (1,) * len(names)),), ())
    placement = placement_of(plan, names[rank], 0, [BucketSpec(index, (index,), ()) for index in range(BUCKETS)])
    assert placement is not None
    sizes = TensorSizes(0, 0, dict.fromkeys(range(BUCKETS), BUCKET_ELEMENTS), torch.float32, torch.float32)
    sender = Sender(names[rank], lambda _, error: reducer.queue.close(str(error)))
    reducer = Reducer(placement, sender.send)
    receiver = Receiver(
        Expectations(placement, sizes), 0, lambda arrival: reducer.queue.put(arrival.header.step, arrival)
    )
    server = PeerServer(StateStore(), partial(sender.priority.give_way, Rank.STATE))
    identity = member(names[rank])
    server.become(identity)
    server.deliver_to(receiver)
    await server.start(f"{addresses[rank]}:{port}")
    say("ready")
    await heard()
    peers = {n: f"{address}:{port}" for n, address in zip(names, addresses, strict=True) if n != names[rank]}
    await sender.connect(1, Dialler(identity), peers, 60, 60)
    codec = codec_named(codec_name)
    step = 0

    async def reduce(tensors: list[torch.Tensor]) -> None:
        nonlocal step
        step += 1
        for index in reversed(range(BUCKETS)):  # as backward finishes them
            reducer.queue.put(step, Final(index))
        await asyncio.to_thread(reducer.reduce, step, dict(enumerate(tensors)), codec, lambda *_: None)
        receiver.advance(step)
        reducer.commit(step)

    return reduce


async def gloo(_: str, rank: int, port: int, addresses: list[str]) -> Reduce:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    say("ready")
    await heard()
    master = f"tcp://{addresses[0]}:{port}"
    await asyncio.to_thread(dist.init_process_group, "gloo", init_method=master, rank=rank, world_size=len(addresses))

    async def reduce(tensors: list[torch.Tensor]) -> None:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        await asyncio.to_thread(lambda: [work.wait() for work in works])

    return reduce


async def hivemind(way: str, rank: int, port: int, addresses: list[str]) -> Reduce:
    """Measures only the all-reduce, after the group has formed. Averages are multiplied to sums."""
    library: Any = importlib.import_module("hivemind")
    stages: Any = importlib.import_module("hivemind.averaging.control").AveragingStage
    kept = Path(f"peer-{port}")  # the address of rank 0, which includes its key
    mine = [f"/ip4/{addresses[rank]}/tcp/{port}"]
    options: dict[str, Any] = {"host_maddrs": mine, "start": True, "use_relay": False, "use_auto_relay": False}
    if rank == 0:
        dht = library.DHT(**options)
        addresses_there = [str(address) for address in dht.get_visible_maddrs()]
        await asyncio.to_thread(kept.write_text, "\n".join(addresses_there))
        say("ready")
        await heard()
    else:
        say("ready")
        await heard()
        first = await asyncio.to_thread(kept.read_text)
        dht = library.DHT(initial_peers=first.splitlines(), **options)
    tensors_there = [torch.zeros(BUCKET_ELEMENTS) for _ in range(BUCKETS)]
    codec: Any = importlib.import_module("hivemind.compression")
    averager = library.averaging.DecentralizedAverager(
        tensors_there,
        dht,
        prefix="bench",
        target_group_size=len(addresses),
        min_group_size=len(addresses),
        compression=codec.Uniform8BitQuantization() if way == "hivemind-8bit" else codec.NoCompression(),
        start=True,
    )
    formed: list[Any] = []

    async def form() -> None:
        control = averager.step(wait=False, require_trigger=True, timeout=600)
        async with asyncio.timeout(HIVEMIND_SECONDS):
            while control.stage is not stages.AWAITING_TRIGGER:
                assert not control.done(), control.result()
                await asyncio.sleep(0.05)
        formed.append(control)

    await form()

    async def reduce(tensors: list[torch.Tensor]) -> None:
        with averager.get_tensors() as there:
            for mine, given in zip(there, tensors, strict=True):
                mine.copy_(given)
        control = formed.pop()
        control.allow_allreduce()
        await asyncio.to_thread(control.result, HIVEMIND_SECONDS)
        with averager.get_tensors() as there:
            for mine, given in zip(there, tensors, strict=True):
                torch.mul(mine, len(addresses), out=given)

    reduce.again = form  # type: ignore[attr-defined]
    return reduce


async def main() -> None:
    torch.set_num_threads(1)
    way, rank, port, addresses = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    make = {"gloo": gloo, "hivemind": hivemind, "hivemind-8bit": hivemind}.get(way, ours)
    tracing: Any = nullcontext()
    if make is ours and (folder := os.environ.get("REDUCE_TRACE")):
        tracing = importlib.import_module("dtfm.node.host.trace").write_trace(
            Path(folder, f"{way}-{rank}.json"), f"n{rank}"
        )
    with tracing:
        reduce = await make(way, rank, port, addresses)
        turn = 1
        tensors = gradients_of(rank, turn)
        say("connected")
        while await heard():
            began = time.perf_counter()
            await reduce(tensors)
            say(f"{time.perf_counter() - began}")
            say(f"{error_of(tensors, len(addresses), turn)}")
            turn += 1
            tensors = gradients_of(rank, turn)
            if (form := getattr(reduce, "again", None)) is not None:
                await form()
            say("again")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    finally:
        # Otherwise children of a way would keep the pipe open whose end tells others that this replica has ended.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)

"""Scripts of steps whose times show how fast nodes and links are."""

from __future__ import annotations

from collections.abc import Iterable

from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.script import LAYERS, LONG, World, fresh_state, two_stages

FLOPS = {"a": 2.4e10, "b": 1.2e10, "c": 1.2e10}
"""With these devices, each node computes for one second in a step of `steady_run`."""


def forked(ids: Iterable[str]) -> Plan:
    """a computes the first half of the layers, b and c the other for half of the micro-batches each; all others are idle. Without
    these three, `two_stages`."""
    if not FLOPS.keys() <= set(ids):
        return two_stages(ids)
    stages = [Stage((0, LAYERS // 2), ("a",), ()), Stage((LAYERS // 2, LAYERS), ("b", "c"), ())]
    return from_routes(0, stages, [(("a", "b"), 2), (("a", "c"), 2)], tuple(sorted(set(ids) - FLOPS.keys())))


def steady_run() -> World:
    """A run on a, b and c that keeps its plan."""
    world = World(fresh_state(**LONG, cluster={"nodes": 3}), forked)
    for node, flops in FLOPS.items():
        world.join(node, device=wire.Device(kind="cpu", name="a cpu", memory_bytes=1 << 33, flops=flops))
    world.settle()
    return world


def timed_steps(
    world: World, count: int, *, seconds: float, arrived: float | None = None, others: float = 1.0, each: float = 2.0
) -> None:
    """Commits ``count`` steps of ``each`` seconds. a computes for ``seconds``, b and c for ``others``. a's 1 GB reaches c in
    ``arrived`` seconds."""
    for _ in range(count):
        world.now += each
        world.vote("a", compute_seconds=seconds)
        world.vote("b", compute_seconds=others)
        came = [wire.StepReady.Arrived(source="a", bytes=10**9, seconds=arrived)] if arrived is not None else []
        world.vote("c", compute_seconds=others, arrived=came)

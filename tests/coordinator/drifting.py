"""Scripts of steps whose times show how fast nodes and links are."""

from __future__ import annotations

from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import LONG, World, training


def steady_run() -> World:
    """A run on a, b and c that keeps its plan."""
    world = training("a", "b", "c", **LONG)
    world.stick_to_plan()
    return world


def timed_steps(world: World, count: int, *, seconds: float, arrived: float | None = None) -> None:
    """``count`` steps of two seconds each, in which a computes for ``seconds`` and its 1 GB reaches c in ``arrived`` seconds."""
    for _ in range(count):
        world.now += 2.0
        world.vote("a", compute_seconds=seconds)
        world.vote("b", compute_seconds=1.0)
        came = [wire.StepReady.Arrived(source="a", bytes=10**9, seconds=arrived)] if arrived is not None else []
        world.vote("c", compute_seconds=1.0, arrived=came)

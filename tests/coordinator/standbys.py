"""Scripts of standbys that report when they are told to."""

from __future__ import annotations

from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import LONG, World, training


def with_standbys(*standbys: str, trainers: str = "ab") -> World:
    """``trainers`` train two stages. The first of the idle ``standbys`` copies the first stage, the second one the second stage,
    and so on. They have caught up, and report nothing more by themselves."""
    world = training(*trainers, **LONG)
    world.stick_to_plan()
    world.join(*standbys)
    world.automatic_standbys = False
    return world


def report(world: World, node: str, step: int | None = None, voted: int | None = None, problem: str = "") -> None:
    """The copy of ``node`` is as of ``step``, and it has the gradients of the next step as voted in generation ``voted``; by
    default, of the step in hand."""
    ledger = world.state.ledger
    number = world.last_to(node, "standby").number
    progress = wire.StandbyProgress(
        number=number,
        step=ledger.step if step is None else step,
        voted=ledger.generation if voted is None else voted,
        problem=problem,
    )
    world.hear(node, standby_progress=progress)

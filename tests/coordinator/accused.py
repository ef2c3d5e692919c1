"""Scripts in which members contradict each other or fail, and the resulting suspicions, quarantines and standings."""

from __future__ import annotations

from typing import Any

from dtfm.coordinator.core.phases import Pausing, Stepping, Switching
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from tests.coordinator.answers import DIGEST
from tests.coordinator.script import LONG, World, training
from tests.coordinator.strangers import strangers

LIE = b"something else".ljust(32)


def of_strangers(*nodes: str, stages: int = 2, **changes: dict[str, Any]) -> World:
    """As `training`, in mode "open", each with a key of its own."""
    return strangers(*nodes, **{**LONG, **changes}, cluster={"stages": stages})


def after_the_last_step(*nodes: str) -> World:
    world = training(*nodes, train={"steps": 1}, checkpoint={"every": 0})
    world.step()
    world.evaluate()
    return world


def fail_in_turn(world: World, *said: tuple[str, wire.StepProblem]) -> None:
    for node, problem in said:
        assert world.exit_code is None
        world.fail_step(node, problem)
        if isinstance(world.state.phase, Switching):
            world.settle()


def wait_for_the_deadline(world: World) -> None:
    assert isinstance(world.state.phase, Stepping | Switching)
    world.wait(world.state.phase.deadline - world.now + 0.1, beating=world.state.members.sessions)


def confirm(world: World, *nodes: str) -> None:
    """These nodes have applied the last commit, and no other has when the pause is over."""
    step, generation = world.state.ledger.training.step, world.state.ledger.training.generation
    for node in nodes:
        world.hear(node, applied=wire.Applied(generation=generation, step=step, state_digest=DIGEST))
    assert isinstance(world.state.phase, Pausing)
    world.wait(world.state.phase.deadline - world.now + 0.1, beating=world.state.members.sessions)


def verdicts(world: World) -> list[tuple[str, Charge, bool]]:
    return [(why.node, why.charge, why.undecided) for why in world.events(ev.NodeQuarantined)]


def goes_on_without(world: World, *nodes: str) -> None:
    """These nodes are gone, and the others commit the next step."""
    assert world.exit_code is None
    assert not set(nodes) & world.state.members.sessions.keys()
    if isinstance(world.state.phase, Pausing):
        world.apply()
    if isinstance(world.state.phase, Switching):
        world.settle()
    step = world.state.ledger.training.step
    world.step()
    assert world.state.ledger.training.step == step + 1
    assert world.refolded() == world.state.ledger

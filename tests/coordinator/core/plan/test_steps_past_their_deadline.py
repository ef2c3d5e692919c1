"""Steps that resume with earlier work cannot be audited. With audits, no member can make steps resume whenever it likes."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core.phases import Pausing, Stepping
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.chains import micro_batches_of
from tests.coordinator.audit_scripts import all_find_it_right, all_vote, asked, auditing
from tests.coordinator.script import World


def says_that_it_has_something(world: World, node: str) -> None:
    """All are ready for the plan, and one says that it has done some of the step."""
    plan = world.plan_in_force
    for other in plan.nodes:
        world.plan_ready(
            other, progress=wire.Progress(finished=micro_batches_of(plan)[node][:1] if other == node else ())
        )


def is_resumed(world: World) -> bool:
    assert isinstance(world.state.phase, Stepping)
    return world.state.phase.resumed


def commit(world: World) -> None:
    before = world.state.ledger.training.step
    resumed = is_resumed(world)
    all_vote(world, **({"sent": [], "received": [], "losses": []} if resumed else {}))
    all_find_it_right(world)
    assert world.state.ledger.training.step == before + 1
    if isinstance(world.state.phase, Pausing):
        world.apply()


def test_once_a_node_has_left_a_step_begins_anew_as_its_names_could_leave_in_every_step() -> None:
    world = auditing("a", "b", "c")
    world.automatic_planning = False
    world.lose("c")
    says_that_it_has_something(world, "a")
    assert not is_resumed(world)


def test_a_step_that_one_member_says_lost_a_peer_begins_anew_and_is_audited_whatever_it_says_that_it_has() -> None:
    world = auditing("a", "b", "c")
    world.fail_step("c", wire.PEER_LOST, peer="a")
    assert world.last_to("b", "assignment").counts_from == world.state.ledger.training.generation
    says_that_it_has_something(world, "c")
    assert not is_resumed(world)
    assert world.last_to("a", "begin") == wire.Begin(generation=world.state.ledger.training.generation, step=1)
    all_vote(world)
    assert asked(world)
    all_find_it_right(world)
    assert world.state.ledger.training.step == 1


@pytest.mark.parametrize("node", ["a", "c"])
def test_a_step_that_begins_under_a_new_plan_was_never_interrupted(node: str) -> None:
    world = auditing("a", "b", "c")
    says_that_it_has_something(world, node)
    world.join("d")
    commit(world)
    says_that_it_has_something(world, node)
    assert world.plan_in_force.nodes == ("a", "b", "c", "d")
    assert not is_resumed(world)

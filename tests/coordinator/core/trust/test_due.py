"""A node whose audit had no result is audited in its next steps, until an audit has a result."""

from __future__ import annotations

from dtfm.coordinator.log import events as ev
from tests.coordinator.audit_scripts import (
    ASKED_IN_VAIN,
    all_vote,
    answer_all,
    asked,
    auditing,
    come_back,
    quarantined,
    trains_again,
)
from tests.coordinator.script import World


def aborts(world: World) -> list[str]:
    return [event.problem for event in world.events(ev.StepAborted)]


def drawn(world: World, node: str) -> None:
    """Steps pass until this node's work of one is done again."""
    all_vote(world)
    while node not in asked(world):
        answer_all(world)
        all_vote(world)


def test_a_step_of_which_the_audited_node_withholds_its_own_part_does_not_count_and_the_next_is_audited() -> None:
    world = auditing("a", "b", "c", rate=0.02)
    drawn(world, "c")
    answer_all(world, of="c", **ASKED_IN_VAIN)
    before = world.state.ledger.training.step
    assert aborts(world) == ["UNAUDITED"]
    assert not quarantined(world)
    world.settle()
    all_vote(world)
    assert world.state.ledger.training.step == before
    assert "c" in asked(world), "its next step is audited for certain"
    answer_all(world)
    assert world.state.ledger.training.step == before + 1


def test_who_leaves_while_its_work_is_done_again_is_audited_when_it_comes_back() -> None:
    world = auditing("a", "b", "c", rate=0.02)
    drawn(world, "c")
    before = world.state.ledger.training.step
    world.lose("c")
    assert world.state.ledger.training.step == before
    assert aborts(world) == ["UNAUDITED"]
    come_back(world, "c")
    world.automatic_audits = False
    all_vote(world)
    assert "c" in asked(world)


def test_what_is_due_stays_due_until_somebody_has_come_to_something() -> None:
    world = auditing("a", "b", "c", rate=0.02)
    drawn(world, "c")
    answer_all(world, of="c", **ASKED_IN_VAIN)
    for _ in range(3):
        trains_again(world)
        all_vote(world)
        assert "c" in asked(world)
        answer_all(world, of="c", problem="no memory")
    all_vote(world)
    assert "c" in asked(world)
    answer_all(world)
    assert not world.state.auditing.due

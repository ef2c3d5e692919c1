"""What a liar did since its last clean audit is undone, as far back as there is a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.trust import Audits
from tests.coordinator.audit_scripts import answer_all, auditing, quarantined
from tests.coordinator.ledgers import altered
from tests.coordinator.script import World


def with_checkpoints(world: World, steps: int, **about_a: Any) -> None:
    """So many steps, each second one with a checkpoint."""
    for _ in range(steps):
        answer_all(world, **about_a)
        if world.state.ledger.training.step % 2 == 0:
            world.save()


def test_a_liar_whose_work_was_found_right_in_the_last_committed_step_has_nothing_to_undo() -> None:
    world = auditing("a", "b", "c")
    for _ in range(3):
        answer_all(world)
    answer_all(world, addends=2.0)
    assert quarantined(world) == [("a", Charge.AUDIT, False)]
    assert not world.events(ev.RolledBack)
    assert world.state.ledger.training.step == 3


def test_what_a_liar_did_since_its_last_clean_audit_is_undone() -> None:
    world = auditing("a", "b", "c", checkpoint={"every": 2, "keep": 3})
    with_checkpoints(world, 3)
    with_checkpoints(world, 3, problem="no memory")
    answer_all(world, addends=2.0)
    (back,) = world.events(ev.RolledBack)
    assert (back.step, back.from_step) == (2, 6), "its last clean audit was of step 3"
    assert "what was done since step 3 is undone" in back.reason
    assert world.state.ledger.training.step == 2
    tidied = world.tidied[-1]
    assert (tidied.newest, tidied.given_up) == (2, frozenset({4, 6})), (
        "nobody may take one that was undone for the newest"
    )
    assert world.plan_in_force.nodes == ("b", "c")
    assert world.refolded() == world.state.ledger


def test_who_was_never_audited_is_undone_to_before_it_came() -> None:
    world = auditing("b", "c", "d", checkpoint={"every": 2, "keep": 3})
    with_checkpoints(world, 5)
    world.join("a")
    with_checkpoints(world, 1)
    world.apply()
    world.settle()
    assert world.plan_in_force.nodes == ("a", "b", "c", "d")
    with_checkpoints(world, 2, problem="no memory")
    answer_all(world, addends=2.0)
    assert [(back.step, back.from_step) for back in world.events(ev.RolledBack)] == [(6, 8)]


def test_what_would_take_too_many_steps_is_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtfm.coordinator.core.plan.undoing.MOST_UNDONE", 3)
    world = auditing("a", "b", "c")
    for _ in range(5):
        answer_all(world, problem="no memory")
    answer_all(world, addends=2.0)
    assert not world.events(ev.RolledBack)
    assert quarantined(world) == [("a", Charge.AUDIT, False)]
    assert world.state.ledger.training.step == 5


def test_checkpoints_that_are_deleted_by_now_are_no_way_back() -> None:
    world = auditing("a", "b", "c", checkpoint={"every": 2, "keep": 1})
    with_checkpoints(world, 3)
    with_checkpoints(world, 3, problem="no memory")
    answer_all(world, addends=2.0)
    assert [back.step for back in world.events(ev.RolledBack)] == [0]


@pytest.mark.parametrize(
    ("found", "wrong", "back"),
    [
        (Audits(4, 5, last_of={"a": 5}, last_added={"a": 3}), {"addends": 2.0}, [2]),
        (Audits(4, 5, last_of={"a": 5}, last_added={"a": 3}), {"losses": 2.0}, [2]),
        (Audits(4, 5, last_of={"a": 5}), {"losses": 2.0}, []),
        (Audits(4, 5, last_of={"a-2": 5}, last_added={"a-2": 5}), {"addends": 2.0}, [0]),
    ],
    ids=[
        "an audit of a micro-batch does not show the node's addends",
        "whatever was wrong",
        "if no addends can be compared",
        "not the audit of another of its names",
    ],
)
def test_the_last_clean_audit_is_one_that_would_have_seen_it(
    found: Audits, wrong: dict[str, Any], back: list[int]
) -> None:
    world = auditing("a", "b", "c", checkpoint={"every": 2, "keep": 3})
    with_checkpoints(world, 5, problem="no memory")
    world.state = replace(world.state, ledger=altered(world.state.ledger, audits={"a": found}))
    answer_all(world, **wrong)
    assert [each.step for each in world.events(ev.RolledBack)] == back

"""The commit waits for the answers to a step's audits. Only answers of the nodes that were asked count:
`core/trust/auditing.py`."""

from __future__ import annotations

from typing import Any

import pytest

from dtfm.coordinator.core.timeouts import STEP_LEASES
from dtfm.coordinator.core.trust.judgement import clean_until
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.standing import Standing, standing_of
from dtfm.protos import control_pb2 as wire
from tests.coordinator.audit_scripts import (
    all_find_it_right,
    all_vote,
    answer_all,
    asked,
    auditing,
    auditor_of,
    quarantined,
    replicas,
    trains_again,
)
from tests.coordinator.honest_work import audited
from tests.coordinator.script import LEASE, LONG, refusal_of, restarted


def test_the_commit_waits_until_all_audits_are_answered() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    assert world.state.ledger.training.step == 0
    assert asked(world).keys() == {"a", "b", "c"}
    for number, by in enumerate(sorted(node for nodes in asked(world).values() for node in nodes), 1):
        assert world.state.ledger.training.step == 0
        world.audit(by)
        assert len(world.events(ev.WorkAudited)) == number
    assert world.state.ledger.training.step == 1
    assert {event.node for event in world.events(ev.WorkAudited) if event.clean} == {"a", "b", "c"}
    assert all(world.state.ledger.trust.audits[node].clean == 1 for node in "abc")
    assert not quarantined(world)
    assert world.refolded() == world.state.ledger


def test_the_answer_is_awaited_no_longer_than_a_usual_step_may_take() -> None:
    world = auditing("a", "b", "c")
    for _ in range(3):
        all_vote(world)
        all_find_it_right(world)
    all_vote(world)
    assert world.state.wakes_at == pytest.approx(world.now + STEP_LEASES * LEASE, rel=1e-3)


def test_an_auditor_is_told_its_time_limit_so_that_it_can_name_the_node_that_kept_it_waiting() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    assert world.state.wakes_at is not None
    assert world.last_to("a", "audit").seconds == pytest.approx((world.state.wakes_at - world.now) * 2 / 3)


def test_an_auditor_that_takes_its_time_does_not_stretch_the_steps_that_come() -> None:
    world = auditing("a", "b", "c")
    waited = []
    for _ in range(4):
        all_vote(world)
        assert world.state.wakes_at is not None
        waited.append(world.state.wakes_at - world.now)
        world.wait(waited[-1] - 1.0, beating="abc")
        answer_all(world)
    assert waited == [waited[0]] * 4


def test_an_answer_counts_only_from_whom_it_is_due_and_once() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    by = auditor_of(world, "a")
    order = world.last_to(by, "audit")
    (other,) = {"b", "c"} - {by}
    world.hear(other, audited(order, addends=2.0))
    world.hear("a", audited(order))
    world.audit(by, number=order.number + 100)
    assert asked(world)["a"] == [by]
    world.audit(by)
    world.hear(by, audited(order, addends=2.0))
    all_find_it_right(world)
    world.hear(by, audited(order, addends=2.0))
    assert world.state.ledger.training.step == 1
    assert not quarantined(world)


@pytest.mark.parametrize("changes", [{"losses": float("nan")}, {"addends": -0.5}, {"withheld_by": "z"}])
def test_an_answer_that_nobody_can_mean_is_refused(changes: dict[str, Any]) -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    by = auditor_of(world, "a")
    world.audit(by, **changes)
    assert refusal_of(world, world.streams[by]).reason == wire.MALFORMED


@pytest.mark.parametrize("changes", [{"problem": "no memory"}, {"losses": -1.0}])
def test_what_could_not_be_compared_counts_neither_way(changes: dict[str, Any]) -> None:
    world = auditing("a", "b", "c")
    answer_all(world, **changes)
    assert world.state.ledger.training.step == 1
    assert {event.node for event in world.events(ev.WorkAudited)} == {"b", "c"}


def test_an_audit_without_an_answer_counts_for_nothing_and_plans_do_without_the_auditor_until_it_is_tested() -> None:
    world = auditing("a", "b", "c")
    world.automatic_tests = False
    all_vote(world)
    while world.state.ledger.training.step == 0:
        for by in [node for nodes in asked(world).values() for node in nodes]:
            if by != "c":
                world.audit(by)
        if world.state.ledger.training.step == 0:
            world.wait(world.state.wakes_at - world.now + 0.1, beating="abc")  # type: ignore[operator]
    assert quarantined(world) == []
    assert world.state.ledger.working == ("a", "b")
    assert "did not answer in time an audit" in world.state.ledger.health["c"].why
    assert all(event.clean for event in world.events(ev.WorkAudited))
    assert world.refolded() == world.state.ledger


@pytest.mark.parametrize("evades", ["leaves", "fails"])
def test_a_stranger_that_evades_its_audit_begins_again_as_a_newcomer(evades: str) -> None:
    world = auditing("a", "b", "c", mode="open")
    while standing_of(world.state.ledger, "a") is not Standing.PROVEN:
        trains_again(world)
        all_vote(world)
        all_find_it_right(world)
    trains_again(world)
    last = clean_until(world.state, "a")
    all_vote(world)
    assert "a" in asked(world)
    if evades == "leaves":
        world.lose("a")
    else:
        world.fail_step("a", wire.INTERNAL)
    assert world.events(ev.StandingLost)[-1].node == "a"
    assert standing_of(world.state.ledger, "a") is Standing.NEW
    assert clean_until(world.state, "a") == last, "what it did since is undone, if it is found wrong"
    assert world.refolded() == world.state.ledger


def test_a_node_that_leaves_while_it_is_audited_takes_its_work_with_it() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    world.lose("a")
    assert world.state.ledger.training.step == 0
    assert world.events(ev.StepAborted)[-1].problem == "UNAUDITED"
    assert world.state.ledger.training.counts_from == world.state.ledger.training.generation


@pytest.mark.parametrize("again", [True, False])
def test_who_is_found_wrong_is_under_suspicion_whether_its_stream_ends_or_another_takes_its_place(
    *, again: bool
) -> None:
    world = auditing("a", "b", "c", "d", mode="open")
    all_vote(world)
    world.audit(auditor_of(world, "a"), losses=2.0, addends=2.0)
    if again:
        world.greet("a")
    else:
        world.lose("a")
    assert world.events(ev.StepAborted)[-1].problem == "UNAUDITED"
    assert [event.charge for event in world.events(ev.Suspected)] == [Charge.WITHHELD]


def test_an_auditor_that_leaves_is_no_way_round_an_audit() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    world.lose(auditor_of(world, "a"))
    assert world.state.ledger.training.step == 0
    world.settle()
    all_vote(world)
    assert "a" in asked(world)
    assert not quarantined(world)


def test_a_restart_forgets_audits_that_wait() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    again = restarted(world, **{**LONG, "trust": {"audit_rate": 1.0}, "cluster": {"nodes": 3}})
    again.planner = replicas
    again.join("a", "b", "c")
    assert again.state.ledger.training.step == 0
    again.settle()
    again.step()
    assert again.state.ledger.training.step == 1

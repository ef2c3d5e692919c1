"""What is held against members because of audits is in the log: a coordinator that is started again knows it."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core.auditing.memory import remembered
from dtfm.coordinator.core.trust.strikes import WORKED_OFF_BY
from dtfm.coordinator.log import events as ev, trust
from dtfm.coordinator.log.ledger import Ledger, fold
from tests.coordinator.audit_scripts import answer_all, auditing, quarantined
from tests.coordinator.script import LONG, World, restarted

CHANGES = {**LONG, "trust": {"audit_rate": 1.0}, "cluster": {"nodes": 3}}

WITHHELD = {"withheld_by": "a", "problem": "WITHHELD"}


def again(world: World) -> World:
    """The next process, once its nodes have come back."""
    after = restarted(world, **CHANGES)
    after.planner = world.planner
    after.join(*"abc", incarnation=2)
    after.settle()
    after.automatic_audits = False
    return after


@pytest.mark.parametrize("kind", ["withheld", "silent"])
def test_two_strikes_and_a_third_after_a_restart_are_three(kind: str) -> None:
    world = auditing("a", "b", "c")
    for number in range(3):
        if kind == "withheld":
            answer_all(world, of="a", **WITHHELD)
        else:
            silent_in_a_step(world)
        assert bool(quarantined(world)) == (number == 2)
        if number < 2:
            assert remembered(world.refolded()).withheld == world.state.auditing.withheld
            assert remembered(world.refolded()).silent.keys() == world.state.auditing.silent.keys()
            world = again(world)
    assert [node for node, *_ in quarantined(world)] == ["a"]
    assert world.refolded() == world.state.ledger
    assert not world.state.ledger.trust.strikes, "the verdict takes their place"


def silent_in_a_step(world: World) -> None:
    """All but a answer, and the step is committed all the same."""
    for node in world.plan_in_force.nodes:
        world.vote(node)
    step = world.state.ledger.training.step
    for _ in range(20):
        for node in "bc":
            kinds = world.kinds_to(node)
            if "audit" in kinds and world.state.ledger.training.step == step:
                world.audit(node)
        world.wait(world.state.lease * 3, beating="abc")
        if quarantined(world) or world.state.ledger.training.step > step:
            return


def test_a_strike_that_is_worked_off_is_over_in_the_log_too() -> None:
    world = auditing("a", "b", "c")
    answer_all(world, of="a", **WITHHELD)
    assert len(world.state.ledger.trust.strikes) == 1
    world.settle()
    for _ in range(WORKED_OFF_BY):
        answer_all(world)
    assert not world.state.auditing.withheld
    assert not world.state.ledger.trust.strikes
    assert world.refolded() == world.state.ledger


def strike(node: str, of: str = "", step: int = 1) -> ev.AuditHindered:
    return ev.AuditHindered(step, 1, node, of, ("c",) if of else ())


def after(*events: ev.Event) -> Ledger:
    return fold([ev.RunStarted("id", {}), ev.Enrolled("a", "node", "key of a", ""), *events])


def test_one_ends_after_the_other_for_each_party_that_was_audited() -> None:
    events = [strike("a", "b", 1), strike("a", "b", 2), strike("a", "a", 3), strike("a", "", 4), strike("b", "a", 5)]
    ended = [ev.StrikesEnded("key of a", "b"), ev.StrikesEnded("key of a"), ev.StrikesEnded("key of a", "key of a")]
    assert [each.step for each in after(*events, *ended).trust.strikes] == [2, 5]
    assert [each.step for each in after(*events, ev.StrikesEnded("key of a", all=True)).trust.strikes] == [5]
    assert after(*events, ev.StrikesEnded("another", "b")).trust.strikes == tuple(events)


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "MOST_HINDERED", 3)
    assert [each.step for each in after(*(strike("a", "b", step) for step in range(9))).trust.strikes] == [6, 7, 8]

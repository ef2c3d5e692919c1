"""How much counts of the gradient norms that stages vote: `core/step/norms`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from dtfm.coordinator.core.step.norms import FACTOR, LARGE, LEAST, MANY, OF
from dtfm.coordinator.core.trust.claims import witnesses
from dtfm.coordinator.log import events as ev
from dtfm.protos.clipping import clip_coefficient
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.script import LONG, World, fresh_state, training
from tests.coordinator.strangers import audited, strangers

LIE = 1e12


def step(world: World, norms: Mapping[str, float]) -> None:
    """Each node votes its norm: 1 if none is given."""
    for node in world.plan_in_force.nodes:
        world.vote(node, squared_gradient_norm=norms.get(node, 1.0) ** 2)


def factors(world: World, node: str) -> list[float]:
    """By what the stages multiply their gradients, as the node was told last."""
    return [clip.factor for clip in world.last_to(node, "commit").clips]


def test_where_nothing_is_bounded_all_stages_clip_to_the_norm_of_all() -> None:
    world = training("a", "b", **LONG)
    step(world, {"a": 3.0, "b": 4.0})
    assert world.events(ev.StepCommitted)[-1].gradient_norm == 5.0
    assert factors(world, "a") == factors(world, "b") == [clip_coefficient(5.0, 1.0)] * 2


@pytest.mark.parametrize("steps", [0, 1, LEAST, 3 * LEAST])
def test_a_norm_that_one_party_alone_says_scales_nobody_elses_gradients(steps: int) -> None:
    world = training("a", "b", **LONG)
    for _ in range(steps):
        step(world, {})
    step(world, {"b": LIE})
    assert world.events(ev.StepCommitted)[-1].gradient_norm == pytest.approx(math.sqrt(2))
    others, own = factors(world, "a")
    assert others == clip_coefficient(math.sqrt(2), 1.0)
    assert own == clip_coefficient(LIE, 1.0)
    (bounded,) = world.events(ev.StageBounded)
    assert (bounded.stage, bounded.nodes, bounded.norm, bounded.usual) == (1, ("b",), LIE, 1.0)
    assert bounded.most == FACTOR
    said = bounded.narrate()
    assert "b alone says the gradient norm of stage 1, 1e+12; 1 is usual, and up to 1e+04 would count" in said
    step(world, {"b": 2.0})
    assert factors(world, "a") == [clip_coefficient(math.sqrt(5), 1.0)] * 2


def test_however_long_it_lies_its_norm_counts_as_it_usually_is() -> None:
    world = training("a", "b", **LONG)
    for _ in range(300):
        step(world, {"b": LIE})
    assert len(world.events(ev.StageBounded)) == 300
    assert {event.gradient_norm for event in world.events(ev.StepCommitted)} == {math.sqrt(2)}


def test_a_node_that_missed_such_a_commit_gets_the_same_factors_with_the_next_plan() -> None:
    world = training("a", "b", "c", **LONG)
    step(world, {"c": LIE})
    told = factors(world, "b")
    world.lose("a")
    assert [clip.factor for clip in world.last_to("b", "assignment").last_commit.clips] == told


def test_an_honest_spike_counts_in_full() -> None:
    """A bad batch makes the gradients of one stage hundreds of times as large (tests.bench.norms)."""
    world = training("a", "b", **LONG)
    for _ in range(LEAST):
        step(world, {})
    step(world, {"a": 600.0})
    assert world.events(ev.StepCommitted)[-1].gradient_norm == pytest.approx(600.0, rel=1e-3)
    assert world.events(ev.StageBounded) == []


def test_where_the_other_stages_rise_more_counts() -> None:
    world = training("a", "b", **LONG)
    for _ in range(LEAST):
        step(world, {})
    step(world, {"a": 50.0, "b": 40 * FACTOR})
    assert world.events(ev.StageBounded) == []
    step(world, {"a": 2.0, "b": 3 * FACTOR})
    (bounded,) = world.events(ev.StageBounded)
    assert (bounded.rise, bounded.usual, bounded.most) == (2.0, 2.0, 2 * FACTOR)


def test_a_stage_that_is_often_large_counts_less() -> None:
    """Each large norm makes the step worth nothing to the others."""
    world = training("a", "b", **LONG)
    for _ in range(LEAST):
        step(world, {})
    for _ in range(2 * OF):
        step(world, {"b": 0.9 * FACTOR})
    assert len(world.events(ev.StageBounded)) == 2 * OF - MANY
    assert {event.most / event.usual for event in world.events(ev.StageBounded)} == {LARGE}


@pytest.mark.parametrize("steps", [0, 3 * LEAST])
def test_a_node_that_says_too_small_a_norm_only_makes_the_others_clip_by_themselves(steps: int) -> None:
    """Nobody knows which of two is wrong. Each one's own gradients stay within the run's bound."""
    world = training("a", "b", **LONG)
    for _ in range(steps):
        step(world, {"a": 4.0, "b": 1e-30})
    step(world, {"a": 4.0, "b": 1e-30})
    assert factors(world, "a")[0] == clip_coefficient(4.0, 1.0)


def test_a_norm_that_two_parties_say_is_not_bounded() -> None:
    world = training("a", "b", "c", **LONG)
    step(world, {"a": LIE, "b": LIE})
    assert world.events(ev.StageBounded) == []
    assert world.events(ev.StepCommitted)[-1].gradient_norm == pytest.approx(LIE)


def test_two_names_of_one_party_are_one_word() -> None:
    world = training("a", "b", "c", **LONG)
    world.belong_together("a", "b")
    step(world, {"a": LIE, "b": LIE})
    assert world.events(ev.StageBounded)[0].nodes == ("a", "b")


def test_where_all_are_one_party_or_nothing_is_clipped_nothing_is_bounded() -> None:
    alone = World(fresh_state(cluster={"nodes": 2}))
    alone.belong_together("a", "b")
    alone.join("a", "b")
    alone.settle()
    free = training("a", "b", train={"clip_norm": 0})
    for world in (alone, free):
        step(world, {"b": LIE})
        assert world.events(ev.StepCommitted)[-1].gradient_norm == LIE
        assert world.events(ev.StageBounded) == []
    assert factors(free, "a") == [1.0, 1.0]


def test_whose_norm_was_bounded_is_audited_next_and_is_alone_in_no_stage_until_an_audit_finds_its_work_right() -> None:
    world = strangers("a", "b", "c", **LONG)
    step(world, {"c": LIE})
    assert world.state.auditing.due.keys() == {"c"}
    ledger = world.state.ledger
    assert witnesses(ledger, ["a", "b", "c"]).tolist() == [True, True, False]
    assert world.wanted or world.state.planner.number > 1, "the planner is asked again"
    audited(world, "c", True)
    assert witnesses(world.state.ledger, ["a", "b", "c"]).tolist() == [False] * 3, "as before"


def test_what_others_learnt_while_a_liars_norm_was_bounded_is_undone_once_the_liar_is_found() -> None:
    """A stage that clips by a lie learns nothing."""
    names = ("a", "b", "c", "d")

    def split(*groups: str) -> Plan:
        stages = [Stage((2 * n, 2 * n + 2), tuple(group), ()) for n, group in enumerate(groups)]
        return from_routes(0, stages, [([group[0] for group in groups], 4)])

    world = strangers(*names, planner=lambda _: split("abc", "d"), **LONG)
    step(world, {})
    world.planner = lambda ids: split("a", "bcd") if "d" in ids else split("a", "bc")
    while world.plan_in_force.stages[1].replicas == ("d",):
        step(world, {"d": LIE})
        world.apply()
    while not (guilty := [event.node for event in world.events(ev.NodeQuarantined)]):
        world.settle()
        step(world, {"d": LIE})
    assert guilty == ["d"]
    (back,) = world.events(ev.RolledBack)
    assert back.step == 0, "there is no snapshot of step 1"
    assert "what was done since step 1 is undone" in back.reason

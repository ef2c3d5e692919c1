"""A step that lost a node goes on under the next plan, and only the lost node's work is done again: `regroup` and `adopt` in
`core/plan/adoption.py`, `core/step/beginning.py`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from dtfm.coordinator.core.phases import Stepping, Switching
from dtfm.coordinator.core.transition import Asked
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.chains import chains
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.script import LAYERS, LEASE, World, fresh_state, two_stages
from tests.coordinator.standbys import caught_up


def two_by_two(_: Iterable[str]) -> Plan:
    """Micro-batches 0 and 2 go from a to c, 1 and 3 from b to d."""
    half = LAYERS // 2
    stages = (Stage((0, half), ("a", "b"), ()), Stage((half, LAYERS), ("c", "d"), ()))
    return from_routes(0, stages, [(("a", "c"), 2), (("b", "d"), 2)])


@pytest.fixture
def world() -> World:
    world = World(fresh_state(cluster={"nodes": 4}, train={"steps": 10}), two_by_two)
    world.join("a", "b", "c", "d")
    world.settle()
    world.automatic_planning = False
    return world


def ready(world: World, node: str, **progress: list[int]) -> None:
    world.plan_ready(node, progress=wire.Progress(**progress))


def test_when_a_replica_is_lost_the_others_go_on_at_once_with_their_micro_batches(world: World) -> None:
    world.lose("d")
    assert isinstance(world.state.phase, Switching)
    assert world.wanted == []
    assert chains(world.plan_in_force) == (("a", "c"), ("b", "c")) * 2
    assert world.last_to("a", "assignment").counts_from == 0


def test_each_node_is_told_what_its_neighbours_already_have(world: World) -> None:
    world.lose("d")
    ready(world, "a", gradients=[0], finished=[0])
    ready(world, "b", gradients=[1])
    ready(world, "c", activations=[0, 2], finished=[0])
    assert world.last_to("a", "begin") == wire.Begin(generation=2, step=1, activations=[0, 2])
    assert world.last_to("c", "begin") == wire.Begin(generation=2, step=1, gradients=[0, 1])
    assert world.events(ev.PlanStarted)[-1] == ev.PlanStarted(2, 1, finished=1)


def test_the_planner_looks_for_a_better_plan_while_the_step_goes_on(world: World) -> None:
    world.lose("d")
    world.settle()
    assert isinstance(world.state.phase, Stepping)
    assert world.wanted[-1].seconds == 0.5 * LEASE


def test_plan_now_is_answered_when_a_node_is_lost_meanwhile(world: World) -> None:
    world.feed(Asked(7, wire.PlanNowRequest(), "operator", 0.0))
    assert world.planned_now == {}
    world.lose("d")
    assert [(ticket, reply.changed) for ticket, reply in world.planned_now.items()] == [(7, False)]


def test_a_standby_takes_the_place_of_the_lost_replica(world: World) -> None:
    world.automatic_planning = True
    world.stick_to_plan()
    world.join("e")
    world.step()
    world.automatic_planning = False
    caught_up(world, "e")
    assert world.last_to("e", "standby").past_last_layer == LAYERS // 2  # of the first stage
    world.lose("b")
    assert chains(world.plan_in_force) == (("a", "c"), ("e", "d")) * 2
    world.lose("c")
    assert chains(world.plan_in_force) == (("a", "d"), ("e", "d")) * 2


def test_nothing_counts_of_an_attempt_that_was_not_finite(world: World) -> None:
    world.fail_step("a", wire.NON_FINITE)
    assert world.last_to("b", "assignment").counts_from == 2
    world.lose("d")
    assert world.last_to("b", "assignment").counts_from == 2
    assert world.events(ev.PlanAdopted)[-1].counts_from == 2


def test_nothing_counts_of_an_attempt_whose_votes_contradict_each_other(world: World) -> None:
    """Nor of one after which the step is tried without somebody: others keep what he sent them."""
    world.vote("a", samples=99)
    assert world.events(ev.StepAborted)[-1].problem == "SETTLED"
    assert world.state.ledger.training.counts_from == 2
    world.lose("d")
    assert world.events(ev.PlanAdopted)[-1].counts_from >= 2


def test_a_broken_stream_between_two_nodes_costs_no_work(world: World) -> None:
    world.fail_step("a", wire.PEER_LOST, peer="c")
    assert world.last_to("b", "assignment").counts_from == 0


@pytest.mark.parametrize("field", ["activations", "gradients", "finished"])
def test_progress_on_micro_batches_of_another_node_is_refused(world: World, field: str) -> None:
    world.lose("d")
    ready(world, "a", **{field: [1]})
    assert world.last_to("a", "refusal").reason == wire.MALFORMED
    assert f"progress.{field}" in world.last_to("a", "refusal").sentence


def test_nothing_counts_of_an_interrupted_step_after_training_went_back(world: World) -> None:
    world.step()
    world.automatic_planning, world.planner = True, two_stages
    world.lose("a")
    world.lose("b")
    assert world.events(ev.RolledBack)[-1].step == 0
    assert world.last_to("c", "assignment").counts_from == world.state.ledger.training.generation


@pytest.mark.parametrize("progress", [{"finished": [0]}, {"activations": [0]}])
def test_the_rest_of_an_interrupted_step_does_not_count_towards_the_training_speed(
    world: World, progress: dict[str, list[int]]
) -> None:
    world.now += 4.0
    world.step()
    world.now += 3.0
    world.lose("d")
    for node in "abc":
        ready(world, node, **(progress if node == "c" else {}))
    world.now += 1.0
    world.step()
    world.now += 8.0
    world.step()
    view = world.view
    first, rest, whole = world.events(ev.StepCommitted)
    assert ["tokens/s" in event.narrate() for event in (first, rest, whole)] == [True, False, True]
    assert view.tokens_per_second == (first.tokens + whole.tokens) / 12.0

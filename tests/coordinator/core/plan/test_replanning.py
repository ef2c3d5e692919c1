"""When the planner is asked, and what becomes of its answers: `core/plan/replanning.py`, in scripted runs (`decide` alone is in
test_decide.py)."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Pausing, Stepping
from dtfm.coordinator.core.plan.steep_start import Fall
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.memory import OptimizerState
from tests.coordinator.script import LEASE, World, fresh_state, training, two_stages


def test_the_run_waits_for_more_nodes_if_no_plan_fits_those_it_has() -> None:
    world = World(planner=lambda ids: "too little memory" if len(list(ids)) < 3 else two_stages(ids))
    world.join("a", "b")
    assert world.events(ev.Waiting)[-1].reason == "too little memory"
    world.wait(LEASE, beating=["a", "b"])
    assert len([e for e in world.events(ev.Waiting) if "too little" in e.reason]) == 1  # it is said once
    world.join("c")
    assert world.state.ledger.training.generation == 1


def test_plan_now_changes_the_plan_at_the_next_commit() -> None:
    world = training("a", "b", "c", cluster={"stages": "auto"})
    world.planner = lambda ids: two_stages(list(ids)[:2])
    world.feed(t.Asked(5, wire.PlanNowRequest(), "operator", 0.0))
    reason = f"as scripted {Fall(None).narrate()}"
    assert world.planned_now == {5: wire.PlanNowReply(changed=True, generation=2, reason=reason)}
    world.step()
    assert world.last_to("a", "commit").pause
    assert isinstance(world.state.phase, Pausing)
    world.apply()
    assert world.last_to("c", "assignment").generation == 2
    assert world.last_to("c", "assignment").step == 1


def test_plan_now_says_so_when_nothing_changes() -> None:
    world = training()
    world.feed(t.Asked(5, wire.PlanNowRequest(), "operator", 0.0))
    assert world.planned_now[5].changed is False
    world.fail_step("a", wire.INTERNAL)
    world.feed(t.Asked(6, wire.PlanNowRequest(), "operator", 0.0))
    assert "under way" in world.planned_now[6].reason


def test_a_plan_requested_before_a_node_left_is_not_adopted() -> None:
    world = World()
    world.automatic_planning = False
    world.join("a", "b")
    world.join("c")
    world.lose("b")
    while world.wanted:
        world.plan()
    assert world.plan_in_force.nodes == ("a", "c")


def test_once_nodes_are_lost_only_the_number_of_stages_stays_pinned() -> None:
    world = World(fresh_state(cluster={"stages": [2, 2], "nodes": 4}))
    world.automatic_planning = False
    world.join("a", "b", "c", "d")
    asked = [world.wanted[-1].stages]
    world.plan()
    world.settle()
    world.lose("d")
    world.settle()
    asked.append(world.wanted[-1].stages)
    assert asked == [(2, 2), 2]


def with_a_lost_stage() -> World:
    """One of two stages has lost its only replica, and an idle node without state is left."""
    world = training("a", "b")
    world.stick_to_plan()
    world.automatic_standbys = False
    world.join("c")
    world.planner = two_stages
    world.automatic_planning = False
    world.lose("a")
    return world


def test_after_losing_a_stage_the_planner_answers_in_haste_and_looks_again_while_the_run_trains() -> None:
    world = with_a_lost_stage()
    assert world.wanted[-1].seconds == 0.01 * LEASE
    world.plan()
    world.settle()
    assert isinstance(world.state.phase, Stepping)
    assert world.wanted[-1].seconds == 0.5 * LEASE


def test_a_hasty_search_that_finds_no_plan_is_followed_by_a_thorough_one() -> None:
    world = with_a_lost_stage()
    world.planner = lambda _: "too little memory"
    world.plan()
    assert world.wanted[-1].seconds == 0.5 * LEASE
    assert not any("too little" in event.reason for event in world.events(ev.Waiting))
    world.plan()
    assert "too little memory" in world.events(ev.Waiting)[-1].reason


def test_what_nodes_may_do_to_keep_what_they_need_is_asked_of_the_run_file_and_not_of_the_log() -> None:
    """It may have changed when the run went on."""
    world = training()
    world.step()
    world.state = replace(world.state, run=fresh_state(train={"optimizer_state": "host"}).run)
    world.automatic_planning = False
    world.feed(t.Asked(1, wire.PlanNowRequest(), "operator", 0.0))
    workload = world.wanted[-1].workload
    assert (workload.checkpointing, workload.optimizer_state) == (None, OptimizerState.HOST)

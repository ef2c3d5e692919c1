"""How a plan comes into force, or fails to: `core/plan_adoption.py`."""

from __future__ import annotations

from dtfm.coordinator.core.state import Stepping, Switching
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import LEASE, World, fresh_state, training


def test_a_plan_goes_to_every_ready_node_and_begins_when_its_nodes_are_ready() -> None:
    world = World()
    world.join("a", "b")
    assert isinstance(world.state.phase, Switching)
    assignment = world.last_to("a", "assignment")
    assert assignment.plan.generation == 1
    assert [peer.node for peer in assignment.peers] == ["a", "b"]
    assert (assignment.step, assignment.snapshot.folder) == (0, "")
    assert world.donors_to("a") == [[], [], [], []]
    world.plan_ready("a")
    assert "begin" not in world.kinds_to("a")
    world.plan_ready("b")
    assert world.last_to("a", "begin") == world.last_to("b", "begin") == wire.Begin(generation=1, step=1)


def test_a_plan_that_cannot_start_is_adopted_again_and_the_third_failure_ends_a_run_of_one_party() -> None:
    world = World()
    world.join("a", "b")
    world.belong_together("a", "b")
    for _ in range(3):
        world.fail_plan("b", "no memory")
    assert [event.generation for event in world.events(ev.PlanAdopted)] == [1, 2, 3]
    assert world.exit_code == 1
    assert "because of b: no memory" in world.last_to("a", "finish").reason


def test_messages_about_an_older_plan_are_ignored() -> None:
    world = World()
    world.join("a", "b")
    world.fail_plan("a", "x")
    world.hear("a", plan_failed=wire.PlanFailed(generation=1, problem="late"))
    world.hear("a", plan_ready=wire.PlanReady(generation=1))
    assert world.state.phase == Switching(frozenset({"a", "b"}), world.now + 100 * LEASE)


def test_a_plan_past_its_deadline_fails_even_if_heartbeats_arrive() -> None:
    world = World()
    world.join("a", "b")
    world.plan_ready("a")
    world.wait(101 * LEASE, beating=["a", "b"])
    assert world.events(ev.PlanFailed)[-1].node == "b"


def test_a_plan_that_fails_without_lost_state_does_not_send_training_back() -> None:
    world = training("a", "b", "c")
    world.step()
    world.lose("a")
    world.fail_plan("b", "no memory")
    assert world.events(ev.RolledBack) == []
    assert world.last_to("b", "assignment").step == 1


def test_losing_a_node_while_state_moves_leads_to_another_plan() -> None:
    world = World(fresh_state(cluster={"nodes": 3}))
    world.join("a", "b", "c")
    world.plan_ready("a")
    world.lose("b")
    assert world.plan_in_force.nodes == ("a", "c")
    world.settle()
    assert isinstance(world.state.phase, Stepping)


def test_a_newcomer_gets_its_place_at_the_next_commit() -> None:
    world = training("a", "b")
    world.join("c")
    assert isinstance(world.state.phase, Stepping)
    assert world.events(ev.PlanAdopted)[-1].generation == 1
    world.step()
    assert world.last_to("a", "commit").pause
    world.apply()
    adopted = world.events(ev.PlanAdopted)[-1]
    assert (adopted.generation, adopted.plan.nodes) == (2, ("a", "b", "c"))
    assert world.donors_to("c") == [["a"], ["a"], ["b"], ["b"]]


def test_a_newcomer_that_leaves_before_the_switch_changes_nothing() -> None:
    world = training("a", "b")
    world.join("c")
    world.lose("c")
    world.step()
    assert not world.last_to("a", "commit").pause
    assert world.events(ev.PlanAdopted)[-1].generation == 1


def test_a_newcomer_that_leaves_during_the_pause_does_not_stop_the_others() -> None:
    world = training("a", "b")
    world.join("c")
    world.step()
    world.lose("c")
    world.apply()
    world.settle()
    assert world.last_to("a", "begin").step == 2

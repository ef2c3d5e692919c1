"""Nodes that join, leave and are lost while a run trains."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core.state import Gathering, Stepping, Switching
from dtfm.coordinator.core.transition import ManifestDone
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import LEASE, World, fresh_state, training, two_stages


def test_losing_a_replica_aborts_the_step_and_the_others_go_on_with_their_state() -> None:
    world = training("a", "b", "c")
    world.step()
    world.vote("b")
    world.lose("a")
    aborted = world.events(ev.StepAborted)[-1]
    assert (aborted.step, aborted.problem, aborted.node) == (2, "NODE_LEFT", "a")
    assert world.last_to("b", "abort").step == 2
    assignment = world.last_to("b", "assignment")
    assert (assignment.plan.generation, assignment.step, assignment.snapshot.folder) == (2, 1, "")
    assert [list(donors.nodes) for donors in assignment.donors] == [["b"], ["b"], ["c"], ["c"]]
    world.settle()
    assert world.last_to("c", "begin") == wire.Begin(generation=2, step=2)
    assert world.events(ev.RolledBack) == []


def test_votes_from_before_a_loss_do_not_count_after_it() -> None:
    world = training("a", "b", "c")
    world.vote("b")
    world.lose("a")
    world.settle()
    world.vote("c")
    world.vote("b", generation=1)
    assert world.state.ledger.step == 0
    world.vote("b")
    assert world.state.ledger.step == 1


def test_losing_a_stage_sends_training_back_to_the_checkpoint() -> None:
    world = training("a", "b", "c", train={"steps": 10})
    world.step()
    world.step()
    world.save()
    world.step()
    world.lose("c")
    rolled = world.events(ev.RolledBack)[-1]
    assert (rolled.from_step, rolled.step, rolled.folder) == (3, 2, "memory://checkpoints/step-00000002")
    assert "1 steps are trained again from the checkpoint of step 2" in rolled.reason
    assignment = world.last_to("a", "assignment")
    assert (assignment.step, assignment.snapshot.folder) == (2, "memory://checkpoints/step-00000002")
    assert all(not donors.nodes for donors in assignment.donors)
    world.settle()
    world.step()
    assert [event.step for event in world.events(ev.StepCommitted)] == [1, 2, 3, 3]


def test_losing_a_stage_without_a_checkpoint_starts_training_over() -> None:
    world = training()
    world.step()
    world.lose("b")
    world.join("b2")
    rolled = world.events(ev.RolledBack)[-1]
    assert (rolled.from_step, rolled.step, rolled.folder) == (1, 0, "")
    assert world.last_to("b2", "assignment").step == 0


def test_losing_a_stage_right_after_a_checkpoint_loses_no_step() -> None:
    world = training(train={"steps": 10})
    world.step()
    world.step()
    world.save()
    world.lose("b")
    world.join("b2")
    assignment = world.last_to("b2", "assignment")
    assert (assignment.step, assignment.snapshot.folder) == (2, "memory://checkpoints/step-00000002")
    assert world.events(ev.RolledBack) == []


def test_too_few_nodes_wait_for_more() -> None:
    world = training()
    world.lose("b")
    assert isinstance(world.state.phase, Gathering)
    assert world.events(ev.Waiting)[-1].reason == "b left (its connection broke): 1 of 2 nodes are ready"
    world.join("c")
    assert isinstance(world.state.phase, Switching)


@pytest.mark.parametrize("how", ["stream", "goodbye", "lease"])
def test_a_membership_ends_with_the_stream_with_a_goodbye_or_with_the_lease(how: str) -> None:
    world = training("a", "b", "c")
    if how == "stream":
        world.lose("a")
    elif how == "goodbye":
        world.hear("a", goodbye=wire.Goodbye(reason="SIGTERM"))
    else:
        world.wait(LEASE * 1.5, beating=["b", "c"])
    assert set(world.state.members.sessions) == {"b", "c"}
    assert isinstance(world.state.phase, Switching)
    assert len(world.events(ev.NodeLeft)) == 1


def test_an_idle_node_that_leaves_interrupts_nothing() -> None:
    world = training("a", "b", cluster={"stages": 2})
    world.planner = lambda ids: world.plan_in_force
    world.join("c")
    world.lose("c")
    assert isinstance(world.state.phase, Stepping)
    assert world.events(ev.StepAborted) == []


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
    donors = [list(d.nodes) for d in world.last_to("c", "assignment").donors]
    assert donors == [["a"], ["a"], ["b"], ["b"]]


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


def test_a_plan_requested_before_a_node_left_is_not_adopted() -> None:
    world = World()
    world.automatic_planning = False
    world.join("a", "b")
    world.join("c")
    world.lose("b")
    while world.wanted:
        world.plan()
    assert world.plan_in_force.nodes == ("a", "c")


def test_losing_a_node_while_state_moves_leads_to_another_plan() -> None:
    world = World(fresh_state(cluster={"nodes": 3}))
    world.join("a", "b", "c")
    world.hear("a", plan_ready=wire.PlanReady(generation=1))
    world.lose("b")
    assert world.plan_in_force.nodes == ("a", "c")
    world.settle()
    assert isinstance(world.state.phase, Stepping)


def test_losing_a_node_after_the_last_step_is_harmless_once_its_part_is_written() -> None:
    world = training(train={"steps": 1})
    world.step()
    world.evaluate()
    world.write_checkpoint()
    world.lose("b")
    world.hear("a", applied=wire.Applied(generation=1, step=1, state_digest=b"state at some step"))
    assert world.exit_code is None
    world.feed(ManifestDone(1, ""))
    assert world.exit_code == 0


def test_losing_a_stage_before_the_last_checkpoint_is_whole_means_training_again() -> None:
    world = training("a", "b", train={"steps": 3})
    world.step()
    world.step()
    world.save()
    world.step()
    world.lose("b")
    assert world.events(ev.CheckpointFailed)[-1].step == 3
    world.join("b2")
    assert world.events(ev.RolledBack)[-1].step == 2
    world.settle()
    world.finish_run()
    assert world.exit_code == 0


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


def test_losing_a_replica_while_the_last_checkpoint_is_written_makes_the_others_write_it_again() -> None:
    world = training("a", "b", "c", train={"steps": 1})
    world.step()
    world.lose("a")
    world.settle()
    assert world.last_to("b", "commit").snapshot == wire.CHECKPOINT
    world.evaluate()
    world.apply()
    world.save()
    assert world.exit_code == 0


def without_a_stage() -> World:
    """Of two stages one has lost its only replica; an idle node is left, without state."""
    world = training("a", "b")
    world.planner = lambda ids: world.plan_in_force
    world.automatic_standbys = False
    world.join("c")
    world.planner = two_stages
    world.automatic_planning = False
    world.lose("a")
    return world


def test_after_losing_a_stage_the_planner_answers_in_haste_and_looks_again_while_the_run_trains() -> None:
    world = without_a_stage()
    assert world.wanted[-1].seconds == 0.01 * LEASE
    world.plan()
    world.settle()
    assert isinstance(world.state.phase, Stepping)
    assert world.wanted[-1].seconds == 0.5 * LEASE


def test_a_hasty_search_that_finds_no_plan_is_followed_by_a_thorough_one() -> None:
    world = without_a_stage()
    world.planner = lambda _: "too little memory"
    world.plan()
    assert world.wanted[-1].seconds == 0.5 * LEASE
    assert not any("too little" in event.reason for event in world.events(ev.Waiting))
    world.plan()
    assert "too little memory" in world.events(ev.Waiting)[-1].reason

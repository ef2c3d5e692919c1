"""A node that wants to leave works on until its part is handed over: `core/members/leaving.py`."""

from __future__ import annotations

from dtfm.coordinator.core.phases import Gathering, Pausing, Stepping, Switching
from dtfm.coordinator.core.transition import ManifestDone
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import LEASE, World, training


def ask_to_leave(world: World, node: str) -> None:
    world.hear(node, leaving=wire.Leaving(reason="SIGTERM"))


def test_a_replica_that_wants_to_leave_works_on_until_the_others_train_without_it() -> None:
    world = training("a", "b", "c")
    ask_to_leave(world, "a")
    assert world.events(ev.NodeLeaving) == [ev.NodeLeaving("a", "SIGTERM")]
    assert isinstance(world.state.phase, Stepping)
    world.step()
    assert world.last_to("a", "commit").pause
    world.apply()
    assignment = world.last_to("b", "assignment")
    assert (assignment.generation, assignment.step) == (2, 1)
    assert "a" not in world.plan_in_force.nodes
    assert ["a", "b"] in map(sorted, world.donors_to("b"))  # a still gives its state
    assert "finish" not in world.kinds_to("a")
    world.settle()
    assert world.last_to("a", "finish").completed
    assert world.events(ev.NodeLeft) == [ev.NodeLeft("a", "in order: SIGTERM")]
    assert world.events(ev.StepAborted) == []
    world.step()
    assert world.state.ledger.training.step == 2


def test_an_idle_node_that_wants_to_leave_goes_at_once() -> None:
    world = training("a", "b")
    world.stick_to_plan()
    world.join("idle")
    ask_to_leave(world, "idle")
    assert world.last_to("idle", "finish").completed
    assert isinstance(world.state.phase, Stepping)


def test_the_last_holder_of_a_stage_leaves_a_checkpoint_behind_if_nobody_can_take_over() -> None:
    world = training("a", "b", train={"steps": 10}, checkpoint={"every": 0})
    world.planner = lambda _: "two stages need two nodes"
    ask_to_leave(world, "b")
    world.step()
    commit = world.last_to("b", "commit")
    assert commit.snapshot
    assert commit.pause
    world.apply()
    assert isinstance(world.state.phase, Pausing)
    world.save()
    assert world.last_to("b", "finish").completed
    assert isinstance(world.state.phase, Gathering)
    world.planner = lambda ids: World().planner(ids)
    world.join("c")
    assert (world.last_to("c", "assignment").step, world.events(ev.RolledBack)) == (1, [])


def test_a_failed_checkpoint_does_not_hold_a_leaving_node_back() -> None:
    world = training("a", "b", train={"steps": 10}, checkpoint={"every": 0})
    world.planner = lambda _: "two stages need two nodes"
    ask_to_leave(world, "b")
    world.step()
    world.apply()
    world.write_snapshot("a")
    world.write_snapshot("b", problem="disk full")
    assert world.last_to("b", "finish").completed


def test_a_newcomer_can_take_over_from_a_leaving_node() -> None:
    world = training("a", "b", train={"steps": 10}, checkpoint={"every": 0})
    everybody = world.planner
    world.planner = lambda ids: everybody(ids) if len(list(ids)) > 1 else "two stages need two nodes"
    ask_to_leave(world, "b")
    world.join("c")
    world.step()
    assert world.last_to("b", "commit").snapshot is False
    world.apply()
    assert isinstance(world.state.phase, Switching)
    assert world.plan_in_force.nodes == ("a", "c")
    assert "finish" not in world.kinds_to("b")
    world.settle()
    assert world.last_to("b", "finish").completed


def test_when_every_node_wants_to_leave_the_state_is_saved_first() -> None:
    world = training("a", "b", train={"steps": 10}, checkpoint={"every": 0})
    world.planner = lambda ids: "no nodes" if not list(ids) else "two stages need two nodes"
    for node in ("a", "b"):
        ask_to_leave(world, node)
    world.step()
    world.apply()
    world.save()
    assert not world.state.members.sessions
    assert world.state.ledger.copies.checkpoint_step == 1


def test_a_chosen_plan_that_needs_a_leaving_node_is_dropped() -> None:
    world = training("a", "b", "c")
    world.join("d")
    assert world.state.planner.chosen is not None
    ask_to_leave(world, "a")
    assert world.state.planner.chosen is not None
    assert "a" not in world.state.planner.chosen.plan.nodes


def test_a_leaving_node_that_dies_is_lost_like_any_other() -> None:
    world = training("a", "b", "c")
    ask_to_leave(world, "a")
    world.lose("a")
    assert world.events(ev.StepAborted)[-1].problem == "NODE_LEFT"
    assert isinstance(world.state.phase, Switching)


def test_while_the_last_checkpoint_waits_for_storage_only_the_sole_holder_of_a_file_stays() -> None:
    world = training(
        "a", "b", "c", train={"steps": 1}, checkpoint={"uri": "memory://full"}
    )  # c alone holds the last stage
    world.step()
    world.evaluate()
    world.apply()
    world.write_snapshot()
    world.send_files(problem="OSError: no room")
    for node in "abc":
        ask_to_leave(world, node)
    assert world.events(ev.NodeLeft)[-1].node == "a"  # b has its files
    world.wait(3 * LEASE, beating="bc")
    assert set(world.state.members.sessions) == {"b", "c"}
    world.send_files()
    world.feed(ManifestDone(1, ""))
    assert world.exit_code == 0

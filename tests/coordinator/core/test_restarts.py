"""After a restart of the coordinator no committed step is lost, and nodes go on from the state that they hold."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core.phases import Gathering, Switching
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import LEASE, MANIFEST, World, restarted, training


def test_a_restarted_coordinator_waits_for_its_nodes_and_loses_no_step() -> None:
    before = training(train={"steps": 10})
    before.step()
    world = restarted(before, train={"steps": 10})
    assert (world.state.ledger.training.step, world.state.ledger.training.plan, dict(world.state.ledger.members)) == (
        1,
        None,
        {},
    )
    world.join("a")
    assert isinstance(world.state.phase, Gathering)
    world.join("b")
    assignment = world.last_to("a", "assignment")
    assert (assignment.generation, assignment.step, assignment.snapshot.folder) == (2, 1, "")
    assert world.donors_to("a") == [["a"], ["a"], ["b"], ["b"]]
    world.settle()
    assert world.last_to("a", "begin") == wire.Begin(generation=2, step=2)


def back_after_a_crash(*nodes: str, incarnation: int = 1) -> World:
    """A restarted coordinator with a checkpoint of step 2, whose nodes have the state as of step 3 in memory, if they are the
    processes that they were: of the first ``incarnation``."""
    before = training(*nodes, train={"steps": 10})
    before.step()
    before.step()
    before.save()
    before.step()
    world = restarted(before, train={"steps": 10}, cluster={"nodes": len(nodes)})
    world.join(*nodes, incarnation=incarnation)
    return world


def test_training_goes_back_to_the_checkpoint_when_nodes_lost_their_state_in_a_crash() -> None:
    world = back_after_a_crash("a", "b")
    world.fail_plan("a", "it is not here", lost=[0, 1])
    assert world.events(ev.RolledBack)[-1].step == 2
    assert world.last_to("a", "assignment").snapshot.folder == "memory://checkpoints/step-00000002"
    assert world.last_to("a", "assignment").snapshot.manifest.hex() == MANIFEST
    world.settle()
    assert world.last_to("a", "begin") == wire.Begin(generation=3, step=3)


def test_a_plan_that_fails_after_a_crash_for_another_reason_does_not_send_training_back() -> None:
    world = back_after_a_crash("a", "b")
    world.fail_plan("a", "b cannot be reached")
    assert world.events(ev.RolledBack) == []
    assignment = world.last_to("a", "assignment")
    assert (assignment.generation, assignment.step) == (3, 3)
    assert world.donors_to("a") == [["a"], ["a"], ["b"], ["b"]]


def test_lost_state_comes_from_a_replica_that_still_holds_it() -> None:
    world = back_after_a_crash("a", "b", "c")  # a and b are replicas of the first stage
    world.fail_plan("a", "it is not here", lost=[0, 1])
    assert world.events(ev.RolledBack) == []
    assert world.donors_to("a") == [["b"], ["b"], ["c"], ["c"]]
    world.fail_plan("c", "it is not here", lost=[3])
    assert world.events(ev.RolledBack)[-1].step == 2
    assert world.last_to("a", "assignment").snapshot.folder == "memory://checkpoints/step-00000002"


def test_nodes_that_report_lost_state_one_after_the_other_do_not_end_the_run() -> None:
    nodes = "abcdefgh"
    world = back_after_a_crash(*nodes)
    for node in nodes[:3]:
        world.fail_plan(node, "it is not here", lost=[0, 1])
    assert world.events(ev.RunFailed) == []
    assert world.donors_to("a") == [["d"]] * 2 + [list("efgh")] * 2


@pytest.mark.parametrize("lost", [[4], [0, 0]])
def test_an_impossible_list_of_lost_buckets_is_refused(lost: list[int]) -> None:
    world = back_after_a_crash("a", "b")
    world.fail_plan("a", "it is not here", lost=lost)
    assert world.last_to("a", "refusal").reason == wire.MALFORMED


def test_nodes_that_restarted_too_hold_nothing_in_memory() -> None:
    world = back_after_a_crash("a", "b", incarnation=2)
    assert world.events(ev.RolledBack)[-1].step == 2


def test_a_restarted_coordinator_goes_on_with_fewer_nodes_after_a_while() -> None:
    before = training("a", "b", "c")
    world = restarted(before, cluster={"nodes": 3})
    world.join("a", "b")
    assert isinstance(world.state.phase, Gathering)
    world.wait(7 * LEASE, beating=["a", "b"])
    assert isinstance(world.state.phase, Switching)


def test_a_run_whose_last_checkpoint_is_whole_is_over_when_resumed() -> None:
    before = training(train={"steps": 1})
    before.step()
    before.evaluate()
    before.save()
    world = restarted(before, train={"steps": 1})
    world.join("a", "b")
    assert world.exit_code == 0


def test_the_last_checkpoint_is_written_again_if_the_coordinator_was_lost_before_it_was_whole() -> None:
    before = training(train={"steps": 1})
    before.step()
    assert before.last_to("a", "commit").snapshot
    world = restarted(before, train={"steps": 1})
    world.join("a", "b")
    world.settle()
    assert world.events(ev.RolledBack) == []
    assert "begin" not in world.kinds_to("a")
    commit = world.last_to("a", "commit")
    assert (commit.generation, commit.step, commit.snapshot, commit.evaluate, commit.pause) == (2, 1, True, True, True)
    world.evaluate()
    world.apply()
    world.save()
    assert world.exit_code == 0
    assert world.events(ev.StepCommitted) == []

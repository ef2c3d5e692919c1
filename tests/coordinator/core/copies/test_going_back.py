"""After the loss of a stage training goes back to the newest snapshot that is whole, on disks or as a checkpoint."""

from __future__ import annotations

from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.state.state import ATTEMPTS
from dtfm.coordinator.core.timeouts import GRACE_LEASES
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import fold
from dtfm.protos import control_pb2 as wire
from tests.coordinator.answers import links
from tests.coordinator.script import BUCKETS, LEASE, LONG, World, prepared, restarted, training
from tests.coordinator.snapshots import DIGESTS, PAUSE, claim, plan_only_with, with_snapshot, with_snapshot_in_halves


def test_losing_a_stage_sends_training_back_to_the_snapshot_and_the_log_says_how_far() -> None:
    world = with_snapshot()
    plan_only_with(world, "b")
    world.lose("a")
    rolled = world.events(ev.RolledBack)[-1]
    assert (rolled.step, rolled.from_step) == (3, 5)
    assert rolled.reason.endswith("2 steps are trained again from the disks' snapshot of step 3")
    assignment = world.last_to("b", "assignment")
    assert (assignment.step, assignment.snapshot.folder) == (3, "")
    assert {part.bucket: (part.digest, list(part.nodes)) for part in assignment.snapshot.parts} == {
        bucket: (DIGESTS[bucket], ["b"]) for bucket in range(BUCKETS)
    }
    assert not any(world.donors_to("b"))
    world.settle()
    assert isinstance(world.state.phase, Stepping)
    assert world.state.phase.step == 4
    assert world.refolded() == world.state.ledger


def test_training_goes_back_to_the_checkpoint_if_that_is_newer() -> None:
    world = with_snapshot(checkpoint={"every": 5})
    world.save()
    world.step()
    plan_only_with(world, "b")
    world.lose("a")
    assert world.events(ev.RolledBack)[-1].step == 5
    assert world.last_to("b", "assignment").snapshot.folder
    assert list(world.last_to("b", "assignment").snapshot.parts) == []


def test_a_snapshot_that_misses_a_part_is_passed_over() -> None:
    world = with_snapshot_in_halves()
    world.step()
    plan_only_with(world, "b")
    world.lose("a")
    world.wait(PAUSE + 1, beating="b")
    assert world.events(ev.RolledBack)[-1].step == 0


def test_the_files_of_a_node_that_returns_with_its_disk_count_again() -> None:
    world = with_snapshot_in_halves()
    world.step()
    world.lose("a")
    assert world.events(ev.RolledBack) == []  # the run needs two nodes
    world.prepare("a", prepared(on_disk=[claim(step, (0, 1)) for step in (1, 2)]), incarnation=2)
    assert world.last_to("a", "keep") == wire.Keep(steps=[2])
    world.hear("a", links("a", ["b"]))
    world.wait(LEASE / 2, beating="ab")
    assert world.events(ev.RolledBack)[-1].step == 2
    assert [list(part.nodes) for part in world.last_to("a", "assignment").snapshot.parts] == [["a"]] * 2 + [["b"]] * 2


def test_a_restarted_coordinator_hears_from_the_nodes_which_snapshots_they_have() -> None:
    world = restarted(with_snapshot(), **LONG)
    for node in "ab":
        claims = [claim(3, range(BUCKETS))]
        world.prepare(node, prepared(on_disk=claims), incarnation=7)  # new processes: all memory is gone
    world.hear("b", links("b", ["a"]))
    assert world.events(ev.RolledBack)[-1].step == 3
    assert [list(part.nodes) for part in world.last_to("a", "assignment").snapshot.parts] == [["a", "b"]] * BUCKETS


def test_a_plan_that_fails_for_another_reason_leaves_the_snapshot_alone() -> None:
    world = with_snapshot()
    plan_only_with(world, "b")
    world.lose("a")
    world.fail_plan("b")
    world.fail_plan("b")
    assert world.last_to("b", "assignment").step == 3


def test_a_run_that_failed_because_no_holder_could_be_reached_still_has_its_snapshot() -> None:
    world = with_snapshot()
    plan_only_with(world, "b")
    world.belong_together("a", "b")
    world.lose("a")
    for _ in range(ATTEMPTS):
        world.wait(5 * LEASE, beating="b")
        world.fail_plan("b")
    assert world.exit_code == 1
    assert world.last_to("b", "keep").steps == [3]
    assert fold(
        [ev.RunResumed("why", dict(world.start.run), dict(world.start.run))], world.refolded()
    ).copies.on_disks.keys() == {3}


def test_a_snapshot_that_is_damaged_twice_is_not_tried_a_third_time() -> None:
    world = with_snapshot()
    plan_only_with(world, "b")
    world.lose("a")
    world.fail_plan("b", snapshot_damaged=True)
    assert world.last_to("b", "assignment").step == 3
    world.fail_plan("b", snapshot_damaged=True)
    assert world.last_to("b", "assignment").step == 0
    assert [rolled.step for rolled in world.events(ev.RolledBack)] == [3, 0]
    assert world.refolded() == world.state.ledger


def test_one_party_alone_does_not_condemn_the_only_snapshot_on_disks() -> None:
    world = with_snapshot()
    world.join("c")
    plan_only_with(world, "b")
    world.lose("a")
    world.fail_plan("b", snapshot_damaged=True)
    plan_only_with(world, "b", "c")
    world.fail_plan("b", snapshot_damaged=True)
    world.wait(5 * LEASE, beating="bc")
    assert world.last_to("c", "assignment").step == 3
    world.fail_plan("c", snapshot_damaged=True)
    assert world.last_to("c", "assignment").step == 0
    assert world.refolded() == world.state.ledger


def test_what_another_could_not_do_for_another_reason_condemns_no_snapshot() -> None:
    world = with_snapshot()
    world.join("c")
    plan_only_with(world, "b", "c")
    world.lose("a")
    world.fail_plan("c", "b cannot be reached")
    world.fail_plan("b", snapshot_damaged=True)
    assert world.last_to("b", "assignment").step == 3


def test_two_names_of_one_key_are_one_party_about_a_checkpoint() -> None:
    world = back_at_the_second_checkpoint("d")
    world.belong_together("a", "b")
    world.join("e")
    for node in "ab":
        world.fail_plan(node, "another manifest", snapshot_damaged=True)
    assert world.last_to("e", "assignment").step == 4


def test_going_back_behind_a_snapshot_forgets_it() -> None:
    world = with_snapshot()
    world.now += PAUSE
    world.step()
    assert world.state.safekeeping.snapshot is not None
    world.lose("a")
    world.lose("b")
    world.join("c", "d")
    world.wait(100 * GRACE_LEASES * LEASE, beating="cd")
    world.settle()
    assert world.events(ev.RolledBack)[-1].step == 0
    assert [world.state.safekeeping.snapshot, world.state.ledger.copies.on_disks] == [None, {}]


def test_losing_a_stage_sends_training_back_to_the_checkpoint() -> None:
    world = training("a", "b", "c", train={"steps": 10})
    world.step()
    world.step()
    world.save()
    world.step()
    world.lose("c")
    rolled = world.events(ev.RolledBack)[-1]
    assert (rolled.from_step, rolled.step) == (3, 2)
    assert "1 step is trained again from the checkpoint of step 2" in rolled.reason
    assignment = world.last_to("a", "assignment")
    assert (assignment.step, assignment.snapshot.folder) == (2, "memory://checkpoints/step-00000002")
    assert not any(world.donors_to("a"))
    world.settle()
    world.step()
    assert [event.step for event in world.events(ev.StepCommitted)] == [1, 2, 3, 3]


def back_at_the_second_checkpoint(*others: str) -> World:
    """c, and the ``others`` of its stage, are lost after step 4."""
    world = training("a", "b", "c", *others, train={"steps": 10})
    for step in range(1, 5):
        world.step()
        if step % 2 == 0:
            world.save()
    for node in ("c", *others):
        world.lose(node)
    assert world.last_to("a", "assignment").snapshot.folder == "memory://checkpoints/step-00000004"
    return world


def test_a_checkpoint_that_two_find_damaged_or_replaced_is_given_up_for_the_one_before() -> None:
    world = back_at_the_second_checkpoint()
    world.fail_plan("a", "another manifest", snapshot_damaged=True)
    world.fail_plan("b", "another manifest", snapshot_damaged=True)
    assert world.last_to("a", "assignment").snapshot.folder == "memory://checkpoints/step-00000002"
    world.settle()
    world.step()
    assert world.state.ledger.training.step == 3


def test_one_node_alone_does_not_send_training_back_behind_a_checkpoint() -> None:
    world = back_at_the_second_checkpoint()
    for attempt in range(3):
        world.fail_plan("a", "another manifest", snapshot_damaged=True)
        assert len(world.events(ev.PlanFailed)) == attempt, "b may say the same"
        world.plan_ready("b")
        world.wait(5 * LEASE, beating="ab")
    assert world.events(ev.NodeQuarantined) == []
    assert world.last_to("b", "assignment").snapshot.folder == "memory://checkpoints/step-00000004"


def test_the_only_checkpoint_is_not_given_up() -> None:
    world = training("a", "b", "c", train={"steps": 10})
    world.step()
    world.step()
    world.save()
    world.lose("c")
    for node in "ababab":
        if world.exit_code is None:
            world.fail_plan(node, "another manifest", snapshot_damaged=True)
    assert world.state.ledger.training.step == 2
    assert world.state.ledger.copies.checkpoints.keys() == {2}
    assert world.exit_code == 1


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

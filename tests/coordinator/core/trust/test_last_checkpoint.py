"""Who keeps the last checkpoint from being written goes, and a run whose checkpoint is whole ends well."""

from __future__ import annotations

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.state import ATTEMPTS, Switching
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from tests.coordinator.accused import (
    after_the_last_step,
    confirm,
    of_strangers,
    verdicts,
)
from tests.coordinator.answers import FILE_DIGEST, snapshot_parts
from tests.coordinator.script import LEASE, World, training


def test_a_run_whose_last_checkpoint_is_whole_ends_well_without_a_word_that_does_not_come() -> None:
    world = after_the_last_step("a", "b", "c")
    world.save()
    confirm(world, "a", "c")
    assert verdicts(world) == []
    assert world.exit_code == 0


def test_who_does_not_write_its_part_of_the_last_checkpoint_is_left_out_and_the_others_write_it() -> None:
    world = after_the_last_step("a", "b", "c")
    for attempt in range(ATTEMPTS):
        assert verdicts(world) == []
        world.apply()
        world.write_checkpoint("a", "b")
        world.now += 100 * LEASE + 1
        world.feed(t.TimePassed())
        if attempt < ATTEMPTS - 1:
            world.settle()
            world.evaluate()
    assert verdicts(world) == [("c", Charge.SNAPSHOT, False)]
    assert world.exit_code is None
    world.join("d")
    assert isinstance(world.state.phase, Switching)


def do_it_again(world: World) -> None:
    """What follows the last commit, from the beginning, if the run is not over."""
    if world.exit_code is None:
        world.apply()
        world.settle()
        world.evaluate()
        world.vote_on_last_evaluation()


def fail_last_checkpoint(world: World, node: str) -> None:
    """This node could not write its part; then all are ready to do it again."""
    world.hear(node, snapshot_parts(1, wire.CHECKPOINT, {}, "no room"))
    do_it_again(world)


def test_the_last_checkpoint_is_written_again_and_without_the_one_that_cannot() -> None:
    world = after_the_last_step("a", "b", "c")
    for _ in range(ATTEMPTS):
        fail_last_checkpoint(world, "b")
        assert world.exit_code is None
    assert verdicts(world) == [("b", Charge.SNAPSHOT, False)]
    world.apply()
    world.save()
    assert world.exit_code == 0


def test_a_last_checkpoint_that_two_parties_cannot_write_fails_the_run() -> None:
    world = after_the_last_step("a", "b", "c")
    for node in "abab":
        if world.exit_code is None:
            fail_last_checkpoint(world, node)
    assert "the last checkpoint could not be written: b could not write its part: no room" in (
        world.events(ev.RunFailed)[-1].reason
    )


def strangers_after_the_last_step(*nodes: str) -> World:
    world = of_strangers(*nodes, train={"steps": 1})
    world.step()
    world.evaluate()
    world.vote_on_last_evaluation()
    return world


def test_two_strangers_who_cannot_write_the_last_checkpoint_are_suspended_and_the_others_write_it() -> None:
    world = strangers_after_the_last_step(*"abklcd")
    for node in "klkl":
        fail_last_checkpoint(world, node)
    assert verdicts(world) == [("k", Charge.SNAPSHOT, True), ("l", Charge.SNAPSHOT, True)]
    assert world.state.ledger.trust.checkpoint_failures == ()
    world.settle()
    world.evaluate()
    world.vote_on_last_evaluation()
    world.apply()
    world.save()
    assert world.exit_code == 0


def test_who_says_that_it_wrote_what_is_not_there_is_found_by_the_bucket() -> None:
    world = after_the_last_step("a", "b", "c")
    for _ in range(ATTEMPTS):
        world.write_checkpoint()
        world.feed(t.ManifestDone(1, "bucket 3 is not there", bucket=3))
        do_it_again(world)
    assert verdicts(world) == [("c", Charge.SNAPSHOT, True)], "others may have removed it"


def test_who_leaves_a_bucket_out_is_found_too() -> None:
    world = after_the_last_step("a", "b", "c")
    for _ in range(ATTEMPTS):
        world.write_checkpoint("a", "b")
        world.hear("c", snapshot_parts(1, wire.CHECKPOINT, {2: (10, FILE_DIGEST)}))
        do_it_again(world)
    assert verdicts(world) == [("c", Charge.SNAPSHOT, False)]


def test_a_problem_of_an_idle_node_with_a_snapshot_changes_nothing() -> None:
    world = training("a", "b", train={"steps": 1}, checkpoint={"every": 0})
    world.stick_to_plan()
    world.join("c")
    world.step()
    world.hear("c", snapshot_parts(1, wire.CHECKPOINT, {}, "no room"))
    assert world.events(ev.CheckpointFailed) == []
    world.evaluate()
    world.apply()
    world.save()
    assert world.exit_code == 0

"""The last checkpoint is tried again until it is whole, by other writers each time. Nobody is blamed for it, and the run never
ends without it."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.copies.checkpoints import RETRY_LEASES
from dtfm.coordinator.core.phases import Pausing, Switching
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.accused import after_the_last_step, confirm, of_strangers, verdicts
from tests.coordinator.answers import FILE_DIGEST, snapshot_parts
from tests.coordinator.script import LEASE, World, training


def test_a_run_whose_last_checkpoint_is_whole_ends_well_without_a_word_that_does_not_come() -> None:
    world = after_the_last_step("a", "b", "c")
    world.save()
    confirm(world, "a", "c")
    assert verdicts(world) == []
    assert world.exit_code == 0


def cannot_write(world: World) -> None:
    world.hear("b", snapshot_parts(1, wire.CHECKPOINT, {}, "no room"))


def leaves_a_bucket_out(world: World) -> None:
    for node in world.plan_in_force.nodes:
        world.hear(node, snapshot_parts(1, wire.CHECKPOINT, {2: (10, FILE_DIGEST)} if node == "c" else {}))


def has_written_nothing(world: World) -> None:
    world.write_checkpoint()
    world.feed(t.ManifestDone(1, "bucket 1 is not there", bucket=1))


def is_silent(world: World) -> None:
    world.apply()
    world.write_checkpoint("a", "c")
    world.wait(100 * LEASE + 1, beating=world.state.members.sessions)


def try_again(world: World) -> None:
    """The time passes after which the checkpoint is tried again, and all are ready to do that."""
    if isinstance(world.state.phase, Pausing):
        world.apply()
    world.wait(RETRY_LEASES * LEASE + 1, beating=world.state.members.sessions)
    if isinstance(world.state.phase, Switching):
        world.settle()
    world.evaluate()


@pytest.mark.parametrize("spoils", [cannot_write, leaves_a_bucket_out, has_written_nothing, is_silent])
@pytest.mark.parametrize("strangers", [False, True])
def test_however_often_it_fails_it_is_tried_again_by_other_writers(spoils: object, strangers: bool) -> None:
    assert callable(spoils)
    world = after_the_last_step("a", "b", "c") if not strangers else of_strangers("a", "b", "c", train={"steps": 1})
    if strangers:
        world.step()
        world.evaluate()
    writers = []
    for _ in range(5):
        (tally,) = world.state.safekeeping.snapshots
        writers.append(frozenset[str]().union(*tally.due_from.values()))
        spoils(world)
        assert world.events(ev.CheckpointFailed)
        try_again(world)
    assert len(set(writers)) > 1
    assert (world.exit_code, verdicts(world)) == (None, [])
    world.apply()
    world.save()
    assert world.exit_code == 0


def test_it_is_not_tried_again_at_once() -> None:
    world = after_the_last_step("a", "b", "c")
    cannot_write(world)
    world.apply()
    assert isinstance(world.state.phase, Pausing)
    world.wait(RETRY_LEASES * LEASE + 1, beating="abc")
    assert isinstance(world.state.phase, Switching)


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

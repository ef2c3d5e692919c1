"""The last checkpoint is tried again until it is whole, by others if it can. Nobody is blamed for it, and the run never
ends without it."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.copies.checkpoints import LONGEST_RETRY_LEASES, RETRY_LEASES
from dtfm.coordinator.core.phases import Pausing, Switching
from dtfm.coordinator.log import events as ev
from tests.coordinator.accused import after_the_last_step, confirm, of_strangers, verdicts
from tests.coordinator.answers import stored
from tests.coordinator.script import LEASE, World, training


def test_a_run_whose_last_checkpoint_is_whole_ends_well_without_a_word_that_does_not_come() -> None:
    world = after_the_last_step("a", "b", "c")
    world.save()
    confirm(world, "a", "c")
    assert verdicts(world) == []
    assert world.exit_code == 0


def cannot_write(world: World) -> None:
    """c alone has the second stage, and no room for it."""
    world.write_snapshot("a", "b")
    world.write_snapshot("c", problem="no room")


def cannot_send(world: World) -> None:
    world.write_checkpoint(problem="no room")


def has_sent_nothing(world: World) -> None:
    world.write_checkpoint()
    world.feed(t.ManifestDone(1, "the folder cannot be written"))


def is_silent(world: World) -> None:
    world.apply()
    if world.state.safekeeping.snapshot is not None:
        world.write_snapshot()
    failed = len(world.events(ev.CheckpointFailed))
    while len(world.events(ev.CheckpointFailed)) == failed:
        world.wait(10 * LEASE, beating=world.state.members.sessions)


def try_again(world: World) -> None:
    """The time passes after which the checkpoint is tried again, and all are ready to do that."""
    if isinstance(world.state.phase, Pausing):
        world.apply()
    for _ in range(LONGEST_RETRY_LEASES):
        world.wait(LEASE, beating=world.state.members.sessions)
        if isinstance(world.state.phase, Switching):
            world.settle()
    world.evaluate()


@pytest.mark.parametrize("spoils", [cannot_write, cannot_send, has_sent_nothing, is_silent])
@pytest.mark.parametrize("strangers", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_however_often_it_fails_it_is_tried_again(spoils: object, strangers: bool) -> None:
    assert callable(spoils)
    world = after_the_last_step("a", "b", "c") if not strangers else of_strangers("a", "b", "c", train={"steps": 1})
    if strangers:
        world.step()
        world.evaluate()
    for attempt in range(1, 4):
        spoils(world)
        assert len(world.events(ev.CheckpointFailed)) >= attempt
        try_again(world)
    assert (world.exit_code, verdicts(world)) == (None, [])
    world.apply()
    while (upload := world.state.safekeeping.upload) is not None and upload.is_in_trouble:
        world.wait(LEASE, beating=world.state.members.sessions)
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
    world.hear("c", stored(1, {}, "no room"))
    assert world.events(ev.CheckpointFailed) == []
    world.evaluate()
    world.apply()
    world.save()
    assert world.exit_code == 0

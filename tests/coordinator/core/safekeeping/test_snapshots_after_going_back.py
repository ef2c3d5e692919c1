"""Training goes back: which backups can still be gone back to, and what of them is on disks that were away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtfm.coordinator.core.safekeeping.availability import on_disk
from dtfm.coordinator.core.timeouts import GRACE_LEASES
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import BUCKETS, LEASE, World, prepared
from tests.coordinator.snapshots import PAUSE, SIZE, alone, backed_up, keep, later, step_on_disks, write

OTHER_DIGESTS = [bytes([bucket]) * 31 + b"x" for bucket in range(BUCKETS)]


def back_up_alone(world: World) -> None:
    """c and d write what they train, and fetch nothing."""
    step = world.last_to("c", "commit").step
    assert world.last_to("c", "commit").snapshot == wire.DISKS
    for node, own in (("c", (0, 1)), ("d", (2, 3))):
        files = [wire.Part(bucket=b, size_bytes=SIZE, digest=OTHER_DIGESTS[b]) for b in own]
        world.hear(node, snapshot_parts=wire.SnapshotParts(destination=wire.DISKS, step=step, parts=files))
    for node in "cd":
        keep(world, node, step, [], problem="OSError: the disk is full")


def gone_back_and_on() -> World:
    """a and b had a backup of step 3 and are away; without them c and d began anew, and have a backup of step 3 of their own."""
    world = backed_up()
    world.lose("a")
    world.lose("b")
    world.join("c", "d")
    world.wait(GRACE_LEASES * LEASE, beating="cd")
    world.settle()
    world.step()
    back_up_alone(world)  # as of step 1
    world.step()
    later(world, PAUSE)
    back_up_alone(world)
    assert world.events(ev.SnapshotWritten)[-1].holders == {"c": ((0, 2),), "d": ((2, 4),)}
    return world


def test_files_from_before_training_went_back_do_not_count_for_a_new_snapshot_of_the_same_step() -> None:
    world = gone_back_and_on()
    world.greet("a", incarnation=2)
    world.hear(
        "a",
        prepared(
            on_disk=[wire.SnapshotParts(step=3, parts=[wire.Part(bucket=b, size_bytes=SIZE) for b in range(BUCKETS)])]
        ),
    )
    assert on_disk(world.state, 3, range(BUCKETS)) == dict(enumerate([("c",), ("c",), ("d",), ("d",)]))


def gone_back_to_a_checkpoint(*, whole: bool) -> World:
    """Of step 5; there was a backup of step 3, and then one of step 6, which was ``whole`` or was not when a went, who alone had
    its first half on disk."""
    world = backed_up(checkpoint={"every": 5})
    world.save()
    later(world, PAUSE)
    assert world.last_to("a", "commit").snapshot == wire.DISKS
    write(world)
    for node in "ab" if whole else "":
        keep(world, node, 6, [], problem="OSError: the disk is full")
    alone(world, "b")
    world.lose("a")
    world.wait((GRACE_LEASES + 1) * LEASE, beating="b")
    assert world.events(ev.RolledBack)[-1].step == 5
    return world


@pytest.mark.parametrize(("whole", "left"), [(False, 3), (True, 0)])
def test_after_going_back_nodes_keep_only_a_snapshot_of_an_earlier_step(whole: bool, left: int) -> None:
    world = gone_back_to_a_checkpoint(whole=whole)
    assert world.last_to("b", "keep_snapshots") == wire.KeepSnapshots(whole=left)
    assert step_on_disks(world) == left
    world.greet("a", incarnation=2)  # it was away when the others heard of that
    world.hear("a", prepared(on_disk=[wire.SnapshotParts(step=step, parts=[wire.Part(bucket=0)]) for step in (3, 6)]))
    assert world.last_to("a", "keep_snapshots") == wire.KeepSnapshots(whole=left)
    assert "a" not in {node for nodes in on_disk(world.state, left, range(1, BUCKETS)).values() for node in nodes}


def test_training_can_go_back_again_to_a_snapshot_of_an_earlier_step() -> None:
    world = gone_back_to_a_checkpoint(whole=False)
    damaged = replace(world.state.ledger, checkpoints={})  # as if its folder were gone
    world.state = replace(world.state, ledger=damaged)
    world.settle()
    world.lose("b")
    world.prepare(
        "b",
        prepared(on_disk=[wire.SnapshotParts(step=3, parts=[wire.Part(bucket=b) for b in range(BUCKETS)])]),
        incarnation=3,
    )
    world.wait(LEASE, beating="b")
    assert world.events(ev.RolledBack)[-1].step == 3
    assert len(world.last_to("b", "assignment").snapshot.parts) == BUCKETS

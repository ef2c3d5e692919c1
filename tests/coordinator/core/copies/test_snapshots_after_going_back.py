"""After training went back: which snapshots on disks still count, and which files of nodes that were away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtfm.coordinator.core.copies.availability import on_disk
from dtfm.coordinator.core.timeouts import GRACE_LEASES
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.ledgers import altered
from tests.coordinator.script import BUCKETS, LEASE, World, prepared
from tests.coordinator.snapshots import (
    PAUSE,
    claim,
    plan_only_with,
    report_files,
    report_full_disk,
    report_written,
    snapshot_begins,
    step_after,
    step_on_disks,
    with_snapshot,
)

OTHER_DIGESTS = [bytes([bucket]) * 31 + b"x" for bucket in range(BUCKETS)]


def write_without_fetching(world: World) -> None:
    """c and d write what they train, with digests of their own, and have no room to fetch anything."""
    step = world.last_to("c", "commit").step
    assert snapshot_begins(world)
    report_files(world, "c", step, [0, 1], digests=OTHER_DIGESTS)
    report_files(world, "d", step, [2, 3], digests=OTHER_DIGESTS)
    report_full_disk(world, step, "c", "d")


def started_over_by_others() -> World:
    """a and b had a snapshot of step 3 and are away. c and d started over, and have a snapshot of step 3 of their own."""
    world = with_snapshot()
    world.lose("a")
    world.lose("b")
    world.join("c", "d")
    world.wait(PAUSE + LEASE, beating="cd")
    world.settle()
    world.step()
    write_without_fetching(world)  # of step 1
    world.step()
    step_after(world, PAUSE)
    write_without_fetching(world)
    assert world.events(ev.SnapshotWritten)[-1].holders == {"c": ((0, 2),), "d": ((2, 4),)}
    return world


def test_files_from_before_training_went_back_do_not_count_for_a_new_snapshot_of_the_same_step() -> None:
    world = started_over_by_others()
    world.prepare("a", prepared(on_disk=[claim(3, range(BUCKETS))]), incarnation=2)
    assert on_disk(world.state, 3, range(BUCKETS)) == dict(enumerate([("c",), ("c",), ("d",), ("d",)]))


def gone_back_to_a_checkpoint(*, whole: bool) -> World:
    """a and b had a snapshot of step 3 and began a snapshot of step 6, which was ``whole`` or not when a left with its half. b
    then went back to the checkpoint of step 5."""
    world = with_snapshot(checkpoint={"every": 5})
    world.save()
    step_after(world, PAUSE)
    assert snapshot_begins(world)
    report_written(world)
    if whole:
        report_full_disk(world, 6, "a", "b")
    plan_only_with(world, "b")
    world.lose("a")
    world.wait((GRACE_LEASES + 1) * LEASE, beating="b")
    assert world.events(ev.RolledBack)[-1].step == 5
    return world


@pytest.mark.parametrize(("whole", "kept"), [(False, [3, 5]), (True, [])])
def test_after_going_back_nodes_keep_only_a_snapshot_of_an_earlier_step(whole: bool, kept: list[int]) -> None:
    world = gone_back_to_a_checkpoint(whole=whole)
    assert world.last_to("b", "keep") == wire.Keep(steps=kept)
    spread = min(kept, default=0)
    assert step_on_disks(world) == spread
    claims = [claim(step, [0]) for step in (3, 6)]
    world.prepare("a", prepared(on_disk=claims), incarnation=2)  # it was away when training went back
    assert world.last_to("a", "keep") == wire.Keep(steps=kept)
    assert "a" not in {node for nodes in on_disk(world.state, spread, range(1, BUCKETS)).values() for node in nodes}


def test_training_can_go_back_again_to_a_snapshot_of_an_earlier_step() -> None:
    world = gone_back_to_a_checkpoint(whole=False)
    damaged = altered(world.state.ledger, checkpoints={})  # as if its folder were gone
    world.state = replace(world.state, ledger=damaged)
    world.settle()
    world.lose("b")
    world.prepare("b", prepared(on_disk=[claim(3, range(BUCKETS))]), incarnation=3)
    world.wait(LEASE, beating="b")
    assert world.events(ev.RolledBack)[-1].step == 3
    assert len(world.last_to("b", "assignment").snapshot.parts) == BUCKETS

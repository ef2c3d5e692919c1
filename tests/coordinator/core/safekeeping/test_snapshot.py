"""Backups on the nodes' own disks: when they are made, and of what another node fetches a copy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtfm.coordinator.core.safekeeping.snapshot import PATIENCE_FACTOR, TIME_FRACTION, pause_after
from dtfm.coordinator.core.state import Destination, Switching
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Route, Stage
from tests.coordinator.script import BUCKETS, LAYERS, LEASE, LONG, World, prepared, training
from tests.coordinator.snapshots import (
    DIGESTS,
    PAUSE,
    SIZE,
    backed_up,
    backed_up_apart,
    keep,
    later,
    missing,
    parts,
    slow_world,
    write,
)


def test_state_that_rests_on_one_node_is_written_to_its_disk_and_fetched_by_another() -> None:
    world = slow_world("a", "b")
    world.step()
    assert [world.last_to(node, "commit").snapshot == wire.DISKS for node in "ab"] == [True, True]
    write(world, "a")
    assert "keep_snapshots" not in world.kinds_to("b")
    world.step()  # nobody waits for it
    keep(world, "b", 2, [2, 3])
    assert (missing(world, "a"), missing(world, "b")) == ({2: ["b"], 3: ["b"]}, {0: ["a"], 1: ["a"]})
    order = world.last_to("a", "keep_snapshots")
    assert (order.whole, order.under_way, [peer.node for peer in order.peers]) == (0, 2, ["b"])
    assert [(part.size_bytes, part.digest) for part in order.missing] == [(SIZE, DIGESTS[2]), (SIZE, DIGESTS[3])]
    world.now += 1.5
    keep(world, "a", 2, [2, 3])
    assert world.events(ev.SnapshotWritten) == []
    keep(world, "b", 2, [0, 1])
    (event,) = world.events(ev.SnapshotWritten)
    assert (event.step, event.holders, event.seconds) == (2, {"a": ((0, 4),), "b": ((0, 4),)}, 1.5)
    assert [part.digest for part in event.parts] == [digest.hex() for digest in DIGESTS]
    assert [world.last_to(node, "keep_snapshots") for node in "ab"] == [wire.KeepSnapshots(whole=2)] * 2
    assert world.refolded() == world.state.ledger


def test_replicas_of_one_stage_fetch_nothing_from_each_other() -> None:
    world = slow_world("a", "b", "c")  # a and b hold the same stage, c one alone
    world.step()
    write(world)
    fetchers = [node for node in "abc" if "keep_snapshots" in world.kinds_to(node)]
    assert [missing(world, node) for node in fetchers] == [{2: ["c"], 3: ["c"]}]
    keep(world, fetchers[0], 2, [2, 3])
    (event,) = world.events(ev.SnapshotWritten)
    assert {node: ranges for node, ranges in event.holders.items() if node not in fetchers} == {
        {"a": "b", "b": "a"}[fetchers[0]]: ((0, 2),),
        "c": ((2, 4),),
    }


def test_no_snapshot_goes_to_disks_if_every_stage_has_two_replicas() -> None:
    world = slow_world("a", "b", "c", "d")
    world.step()
    assert world.last_to("a", "commit").snapshot != wire.DISKS


def test_no_snapshot_goes_to_disks_if_a_standby_of_every_stage_keeps_up() -> None:
    world = training("a", "b", **LONG)
    world.now += 1
    world.step()  # links allow that neighbours copy each other, see test_copying.py
    world.now += PAUSE
    world.step()
    assert world.last_to("a", "commit").snapshot != wire.DISKS
    for node in "ab":
        number = world.last_to(node, "standby").number
        world.hear(node, standby_progress=wire.StandbyProgress(number=number, problem="TOO_SLOW"))
    world.step()
    assert world.last_to("a", "commit").snapshot == wire.DISKS


def test_a_node_that_catches_up_as_a_standby_does_not_fetch_the_snapshot_over_the_same_link() -> None:
    world = training("a", "b", **LONG)
    world.automatic_standbys = False
    world.now += 1
    world.step()
    assert world.last_to("a", "standby").number  # neighbours begin to copy each other
    world.now += PAUSE
    world.step()
    assert world.last_to("a", "commit").snapshot == wire.DISKS
    write(world)
    assert [missing(world, node) for node in "ab"] == [{}, {}]
    assert world.events(ev.SnapshotWritten)[-1].holders == {"a": ((0, 2),), "b": ((2, 4),)}


def test_nodes_stop_fetching_a_snapshot_when_a_new_plan_moves_state() -> None:
    world = slow_world("a", "b")
    world.step()
    write(world)
    later(world, 0.001)
    began = world.now
    world.join("c")
    world.now = began
    later(world, 0.001)  # no link carries a step's gradients in that time, so nobody copies in advance
    assert missing(world, "b") == {0: ["a"], 1: ["a"]}
    world.apply()
    assert isinstance(world.state.phase, Switching)
    assert [missing(world, node) for node in "ab"] == [{}, {}]
    assert world.events(ev.SnapshotWritten)[-1].holders == {"a": ((0, 2),), "b": ((2, 4),)}


def test_the_pause_after_a_snapshot_grows_with_the_time_it_took() -> None:
    assert pause_after(0.5, 10) == pytest.approx(60)
    assert pause_after(50, 10) == pytest.approx(600)
    assert pause_after(5000, 10) == pytest.approx(5000 / TIME_FRACTION)


def test_a_snapshot_that_took_long_is_not_followed_at_once() -> None:
    world = slow_world("a", "b")
    world.step()
    world.now += PAUSE
    world.step()
    assert world.last_to("a", "commit").snapshot != wire.DISKS  # the first is under way
    keep(world, "a", 2, [0, 1])
    keep(world, "b", 2, [2, 3])
    keep(world, "a", 2, [2, 3])
    keep(world, "b", 2, [0, 1])
    world.now += pause_after(PAUSE, LEASE) - PAUSE - 1
    world.step()
    assert world.last_to("a", "commit").snapshot != wire.DISKS
    world.now += 1
    world.step()
    assert world.last_to("a", "commit").snapshot == wire.DISKS


def test_a_writer_that_never_answers_does_not_hold_up_the_next_snapshot() -> None:
    world = slow_world("a", "b")
    world.step()
    write(world, "a")
    later(world, PATIENCE_FACTOR * LEASE)
    assert world.state.safekeeping.snapshot(Destination.DISKS) is not None
    later(world, 1)
    assert world.state.safekeeping.snapshot(Destination.DISKS) is None
    assert world.events(ev.SnapshotWritten) == []
    later(world, pause_after(0, LEASE) - 1)  # to wait in vain cost nothing
    assert world.last_to("a", "commit").snapshot != wire.DISKS
    later(world, 1)
    assert world.last_to("a", "commit").snapshot == wire.DISKS


def test_a_writer_that_never_answers_is_not_missed_if_another_replica_answers() -> None:
    world = slow_world("a", "b", "c")  # a and b hold the same stage
    world.step()
    write(world, "a", "c")
    later(world, PATIENCE_FACTOR * LEASE + 1)
    asked = {node: missing(world, node) for node in "abc" if "keep_snapshots" in world.kinds_to(node)}
    assert sorted(bucket for buckets in asked.values() for bucket in buckets) == [0, 1, 2, 3]


def test_a_file_that_is_never_fetched_stays_on_one_disk() -> None:
    world = slow_world("a", "b")
    world.step()
    write(world)
    keep(world, "a", 2, [2, 3])
    later(world, PATIENCE_FACTOR * LEASE)
    assert world.events(ev.SnapshotWritten) == []
    later(world, 1)
    assert world.events(ev.SnapshotWritten)[-1].holders == {"a": ((0, 4),), "b": ((2, 4),)}


def test_large_files_may_take_longer_to_write_and_to_fetch() -> None:
    world = slow_world("a", "b")
    described = world.state.ledger.described
    assert described is not None
    large = [replace(layer, parameter_bytes=10e9) for layer in described.workload.layers]
    described = replace(described, workload=replace(described.workload, layers=tuple(large)))
    world.state = replace(world.state, ledger=replace(world.state.ledger, described=described))
    world.step()
    assert world.last_to("a", "commit").snapshot == wire.DISKS
    later(world, PATIENCE_FACTOR * 600)  # 60 GB each
    for node, buckets in (("a", (0, 1)), ("b", (2, 3))):
        files = [wire.Part(bucket=b, size_bytes=10**12, digest=DIGESTS[b]) for b in buckets]
        world.hear(node, snapshot_parts=wire.SnapshotParts(destination=wire.DISKS, step=2, parts=files))
    later(world, PATIENCE_FACTOR * 2000)  # 2 TB over 1 GB/s
    assert world.state.safekeeping.snapshot(Destination.DISKS) is not None
    later(world, 1)
    assert world.state.safekeeping.snapshot(Destination.DISKS) is None


def test_no_snapshot_goes_to_disks_for_a_while_after_a_checkpoint() -> None:
    world = slow_world("a", "b", checkpoint={"every": 2})
    world.step()
    assert (
        world.last_to("a", "commit").snapshot == wire.CHECKPOINT,
        world.last_to("a", "commit").snapshot == wire.DISKS,
    ) == (
        True,
        False,
    )
    world.step()
    assert world.last_to("a", "commit").snapshot != wire.DISKS


def test_nodes_keep_a_snapshot_until_the_next_is_whole() -> None:
    world = backed_up()
    world.now += PAUSE
    world.step()
    assert world.last_to("a", "commit").snapshot == wire.DISKS
    write(world, "a", "b")
    assert (world.last_to("a", "keep_snapshots").whole, world.last_to("a", "keep_snapshots").under_way) == (3, 6)
    keep(world, "a", 6, [2, 3])
    keep(world, "b", 6, [0, 1])
    assert world.last_to("a", "keep_snapshots") == wire.KeepSnapshots(whole=6)


def test_a_node_that_cannot_store_its_files_is_replaced_by_another() -> None:
    world = slow_world("a", "b", "c", cluster={"stages": [1, 1, 1]})
    thirds = (Stage((0, 1), ("a",)), Stage((1, 2), ("b",)), Stage((2, LAYERS), ("c",)))
    world.state = replace(
        world.state,
        ledger=replace(
            world.state.ledger, plan=replace(world.plan_in_force, stages=thirds, routes=(Route(tuple("abc"), 4),))
        ),
    )
    world.step()
    write(world)
    asked = {node: missing(world, node) for node in "abc" if "keep_snapshots" in world.kinds_to(node)}
    (unable,) = [node for node, buckets in asked.items() if 2 in buckets]
    other = "b" if unable == "a" else "a"
    keep(world, unable, 2, [], problem="OSError: the disk is full")
    assert {2, 3} <= missing(world, other).keys()


def test_a_node_that_reports_success_without_the_files_is_asked_once() -> None:
    world = slow_world("a", "b")
    world.step()
    write(world)
    for node in "ab":
        keep(world, node, 2, [])
    assert world.events(ev.SnapshotWritten)[-1].holders == {"a": ((0, 2),), "b": ((2, 4),)}


def test_a_snapshot_is_whole_even_if_no_second_disk_has_room() -> None:
    world = backed_up_apart()
    (event,) = world.events(ev.SnapshotWritten)
    assert event.holders == {"a": ((0, 2),), "b": ((2, 4),)}


def test_a_snapshot_is_given_up_when_its_only_writer_is_lost() -> None:
    world = slow_world("a", "b")
    world.join("c")
    world.step()
    assert world.state.safekeeping.snapshot(Destination.DISKS) is not None
    write(world, "b")
    world.lose("a")
    assert world.state.safekeeping.snapshot(Destination.DISKS) is None
    assert world.events(ev.SnapshotWritten) == []


def test_a_writer_that_reconnects_is_not_waited_for() -> None:
    world = slow_world("a", "b", "c")  # a and b hold the same stage
    world.step()
    write(world, "a", "c")
    world.greet("b")  # on a new stream; it may have missed the commit
    asked = {node: missing(world, node) for node in "abc" if "keep_snapshots" in world.kinds_to(node)}
    assert sorted(bucket for buckets in asked.values() for bucket in buckets) == [0, 1, 2, 3]


def test_a_replicas_file_with_another_digest_does_not_count() -> None:
    world = slow_world("a", "b", "c")
    world.step()
    write(world, "a", "c")
    other = [wire.Part(bucket=bucket, size_bytes=SIZE, digest=b"x" * 32) for bucket in (0, 1)]
    world.hear("b", snapshot_parts=wire.SnapshotParts(destination=wire.DISKS, step=2, parts=other))
    asked = {node: missing(world, node) for node in "abc" if "keep_snapshots" in world.kinds_to(node)}
    assert sorted(bucket for buckets in asked.values() for bucket in buckets) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (wire.SnapshotParts(step=2, parts=parts([1]) * 2), "parts is 2"),
        (wire.SnapshotParts(step=2, parts=[wire.Part(bucket=BUCKETS, digest=DIGESTS[0])]), "parts.bucket"),
        (wire.SnapshotParts(step=2, parts=[wire.Part(bucket=1, digest=b"short")]), "parts.digest"),
        (
            wire.SnapshotParts(step=2, parts=[wire.Part(bucket=1, digest=DIGESTS[1], size_bytes=1 << 60)]),
            "parts.size_bytes",
        ),
    ],
)
def test_impossible_snapshot_files_are_refused(kept: wire.SnapshotParts, words: str) -> None:
    world = slow_world("a", "b")
    world.step()
    world.hear("a", snapshot_parts=kept)
    assert words in world.last_to("a", "refusal").sentence


def test_a_writer_may_report_only_its_own_layers() -> None:
    world = slow_world("a", "b")
    world.step()
    keep(world, "a", 2, [0, 2])
    assert "parts.bucket is 2; it must be of the node's layers, 0 to 1" in world.last_to("a", "refusal").sentence


def test_claims_of_snapshots_of_too_many_steps_are_refused() -> None:
    world = slow_world("a", "b")
    world.prepare("c", prepared(on_disk=[wire.SnapshotParts(step=step) for step in range(5)]))
    assert "on_disk is 5" in world.last_to("c", "refusal").sentence


def test_files_that_were_not_asked_for_are_ignored() -> None:
    world = slow_world("a", "b")
    keep(world, "a", 1, [0, 1])
    world.step()
    keep(world, "a", 7, [0, 1])
    write(world, "a")
    keep(world, "a", 2, [2, 3])
    assert world.state.members.sessions["a"].on_disk == {2: frozenset({0, 1})}


def measuring(world: World, node: str, kept: list[wire.SnapshotParts]) -> None:
    """The node has come with this on its disk, and measures its links."""
    world.prepare(node, prepared(on_disk=kept), incarnation=3)
    assert world.heard_by(node)[-1].WhichOneof("message") == "probe"


def test_a_node_that_still_measures_its_links_is_told_what_to_keep_too() -> None:
    world = backed_up()
    measuring(world, "c", [wire.SnapshotParts(step=3, parts=[wire.Part(bucket=0, size_bytes=SIZE)])])
    world.now += PAUSE
    world.step()
    write(world, "a", "b")
    keep(world, "a", 6, [2, 3])
    keep(world, "b", 6, [0, 1])
    assert world.last_to("c", "keep_snapshots") == wire.KeepSnapshots(whole=6)
    assert world.state.members.sessions["c"].on_disk == {}


def test_files_without_digests_do_not_count_for_a_snapshot_under_way() -> None:
    world = slow_world("a", "b")
    world.step()
    write(world, "a")
    measuring(
        world, "c", [wire.SnapshotParts(step=2, parts=[wire.Part(bucket=b, size_bytes=SIZE) for b in range(BUCKETS)])]
    )
    assert world.last_to("c", "keep_snapshots") == wire.KeepSnapshots(under_way=2)
    write(world, "b")
    assert (missing(world, "a"), missing(world, "b")) == ({2: ["b"], 3: ["b"]}, {0: ["a"], 1: ["a"]})

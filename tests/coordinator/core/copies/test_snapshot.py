"""Snapshots on the nodes' own disks, when they are made and who fetches which files: `core/copies/snapshot.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest

from dtfm.coordinator.core.copies.availability import on_disk
from dtfm.coordinator.core.copies.snapshot import PATIENCE_FACTOR, TIME_FRACTION, pause_after
from dtfm.coordinator.core.phases import Switching
from dtfm.coordinator.core.trust.disputes import kept_apart
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.ledgers import altered
from tests.coordinator.script import BUCKETS, LAYERS, LEASE, LONG, World, prepared, training
from tests.coordinator.snapshots import (
    DIGESTS,
    PAUSE,
    SIZE,
    all_to_fetch,
    claim,
    parts,
    report_fetched,
    report_files,
    report_full_disk,
    report_written,
    snapshot_begins,
    snapshot_due,
    step_after,
    to_fetch,
    with_snapshot,
)
from tests.coordinator.standbys import caught_up


def test_state_that_rests_on_one_node_is_written_to_its_disk_and_fetched_by_another() -> None:
    world = snapshot_due("a", "b")
    world.step()
    assert snapshot_begins(world)
    report_written(world, "a")
    assert "move" not in world.kinds_to("b")
    world.step()  # no commit waits for the snapshot
    report_files(world, "b", 2, [2, 3])
    assert (to_fetch(world, "a"), to_fetch(world, "b")) == ({2: ["b"], 3: ["b"]}, {0: ["a"], 1: ["a"]})
    order, kept = world.last_to("a", "move"), world.last_to("a", "keep")
    assert (list(kept.steps), order.step, order.folder, [peer.node for peer in order.peers]) == ([2], 2, "", ["b"])
    assert [(part.size_bytes, part.digest) for part in order.parts] == [(SIZE, DIGESTS[2]), (SIZE, DIGESTS[3])]
    world.now += 1.5
    report_files(world, "a", 2, [2, 3])
    assert world.events(ev.SnapshotWritten) == []
    report_files(world, "b", 2, [0, 1])
    (event,) = world.events(ev.SnapshotWritten)
    assert (event.step, event.holders, event.seconds) == (2, {"a": ((0, 4),), "b": ((0, 4),)}, 1.5)
    assert [part.digest for part in event.parts] == [digest.hex() for digest in DIGESTS]
    assert [world.last_to(node, "keep") for node in "ab"] == [wire.Keep(steps=[2])] * 2
    assert world.refolded() == world.state.ledger


def test_replicas_of_one_stage_fetch_nothing_from_each_other() -> None:
    world = snapshot_due("a", "b", "c")  # a and b are replicas of the first stage
    world.step()
    report_written(world)
    ((fetcher, wanted),) = all_to_fetch(world).items()
    assert wanted == {2: ["c"], 3: ["c"]}
    report_files(world, fetcher, 2, [2, 3])
    (event,) = world.events(ev.SnapshotWritten)
    other = {"a": "b", "b": "a"}[fetcher]
    assert {node: ranges for node, ranges in event.holders.items() if node != fetcher} == {
        other: ((0, 2),),
        "c": ((2, 4),),
    }


def test_no_snapshot_goes_to_disks_if_every_stage_has_two_replicas() -> None:
    world = snapshot_due("a", "b", "c", "d")
    world.step()
    assert not snapshot_begins(world)


def test_no_snapshot_goes_to_disks_if_a_standby_of_every_stage_keeps_up() -> None:
    world = training("a", "b", **LONG)
    world.now += 1
    world.step()  # the links allow neighbours to be standbys, see test_standby.py
    world.now += PAUSE
    world.step()
    assert not snapshot_begins(world)
    for node in "ab":
        caught_up(world, node, step=0, problem="TOO_SLOW")
    world.step()
    assert snapshot_begins(world)


def test_a_node_that_catches_up_as_a_standby_does_not_fetch_the_snapshot_over_the_same_link() -> None:
    world = training("a", "b", **LONG)
    world.automatic_standbys = False
    world.now += 1
    world.step()
    assert world.last_to("a", "standby").number  # neighbours become standbys of each other
    world.now += PAUSE
    world.step()
    assert snapshot_begins(world)
    report_written(world)
    assert [to_fetch(world, node) for node in "ab"] == [{}, {}]
    assert world.events(ev.SnapshotWritten)[-1].holders == {"a": ((0, 2),), "b": ((2, 4),)}


def test_nodes_stop_fetching_a_snapshot_when_a_new_plan_moves_state() -> None:
    world = snapshot_due("a", "b")
    world.step()
    report_written(world)
    step_after(world, 0.001)
    began = world.now
    world.join("c")
    world.now = began
    step_after(world, 0.001)  # in that time no link carries a step's gradients, so c cannot be a standby first
    assert to_fetch(world, "b") == {0: ["a"], 1: ["a"]}
    world.apply()
    assert isinstance(world.state.phase, Switching)
    assert [to_fetch(world, node) for node in "ab"] == [{}, {}]
    assert world.events(ev.SnapshotWritten)[-1].holders == {"a": ((0, 2),), "b": ((2, 4),)}


def test_the_pause_after_a_snapshot_grows_with_the_time_it_took() -> None:
    assert pause_after(0.5, 10) == pytest.approx(60)
    assert pause_after(50, 10) == pytest.approx(600)
    assert pause_after(5000, 10) == pytest.approx(5000 / TIME_FRACTION)


def test_a_snapshot_that_took_long_is_not_followed_at_once() -> None:
    world = snapshot_due("a", "b")
    world.step()
    world.now += PAUSE
    world.step()
    assert not snapshot_begins(world)  # the first is under way
    report_files(world, "a", 2, [0, 1])
    report_files(world, "b", 2, [2, 3])
    report_fetched(world, 2)
    world.now += pause_after(PAUSE, LEASE) - PAUSE - 1
    world.step()
    assert not snapshot_begins(world)
    world.now += 1
    world.step()
    assert snapshot_begins(world)


def test_a_writer_that_never_answers_does_not_hold_up_the_next_snapshot() -> None:
    world = snapshot_due("a", "b")
    world.step()
    report_written(world, "a")
    step_after(world, PATIENCE_FACTOR * LEASE)
    assert world.state.safekeeping.snapshot is not None
    step_after(world, 1)
    assert world.state.safekeeping.snapshot is None
    assert world.events(ev.SnapshotWritten) == []
    step_after(world, pause_after(0, LEASE) - 1)  # the wait in vain cost nothing
    assert not snapshot_begins(world)
    step_after(world, 1)
    assert snapshot_begins(world)


def test_a_writer_that_never_answers_is_not_missed_if_another_replica_answers() -> None:
    world = snapshot_due("a", "b", "c")  # a and b are replicas of the first stage
    world.step()
    report_written(world, "a", "c")
    step_after(world, PATIENCE_FACTOR * LEASE + 1)
    assert sorted(itertools.chain(*all_to_fetch(world).values())) == [0, 1, 2, 3]


def test_a_file_that_is_never_fetched_stays_on_one_disk() -> None:
    world = snapshot_due("a", "b")
    world.step()
    report_written(world)
    report_files(world, "a", 2, [2, 3])
    step_after(world, PATIENCE_FACTOR * LEASE)
    assert world.events(ev.SnapshotWritten) == []
    step_after(world, 1)
    assert world.events(ev.SnapshotWritten)[-1].holders == {"a": ((0, 4),), "b": ((2, 4),)}


def test_large_files_may_take_longer_to_write_and_to_fetch() -> None:
    world = snapshot_due("a", "b")
    described = world.state.ledger.described
    assert described is not None
    large = [replace(layer, parameter_bytes=10e9) for layer in described.workload.layers]
    described = replace(described, workload=replace(described.workload, layers=tuple(large)))
    world.state = replace(world.state, ledger=replace(world.state.ledger, described=described))
    world.step()
    assert snapshot_begins(world)
    step_after(world, PATIENCE_FACTOR * 600)  # 60 GB each
    report_files(world, "a", 2, [0, 1], size=10**12)
    report_files(world, "b", 2, [2, 3], size=10**12)
    step_after(world, PATIENCE_FACTOR * 2000)  # 2 TB over 1 GB/s
    assert world.state.safekeeping.snapshot is not None
    step_after(world, 1)
    assert world.state.safekeeping.snapshot is None


def test_a_snapshot_is_not_whole_when_the_only_disk_with_a_part_of_it_has_left() -> None:
    world = snapshot_due("a", "b")
    world.step()
    report_written(world)
    report_files(world, "a", 2, [2, 3])  # b has still to fetch from a
    world.lose("a")
    world.wait((PATIENCE_FACTOR + 1) * LEASE, beating="b")
    assert world.state.safekeeping.snapshot is None
    assert world.events(ev.SnapshotWritten) == []


def test_nodes_keep_a_snapshot_until_the_next_is_whole() -> None:
    world = with_snapshot()
    world.now += PAUSE
    world.step()
    assert snapshot_begins(world)
    report_written(world, "a", "b")
    assert world.last_to("a", "keep").steps == [3, 6]
    report_fetched(world, 6)
    assert world.last_to("a", "keep") == wire.Keep(steps=[6])


@pytest.mark.parametrize("says_so", [True, False])
def test_a_node_that_cannot_store_its_files_or_is_late_is_replaced_by_another(says_so: bool) -> None:
    world = snapshot_due("a", "b", "c", cluster={"stages": [1, 1, 1]})
    thirds = (Stage((0, 1), ("a",), ()), Stage((1, 2), ("b",), ()), Stage((2, LAYERS), ("c",), ()))
    plan = from_routes(world.plan_in_force.generation, thirds, [(tuple("abc"), 4)])
    world.state = replace(world.state, ledger=altered(world.state.ledger, plan=plan))
    world.step()
    report_written(world)
    asked = all_to_fetch(world)
    (unable,) = [node for node, buckets in asked.items() if 2 in buckets]
    other = "b" if unable == "a" else "a"
    if says_so:
        report_full_disk(world, 2, unable)
    else:
        for node in asked.keys() - {unable}:
            report_files(world, node, 2, asked[node])
        step_after(world, PATIENCE_FACTOR * LEASE + 1)
    assert {2, 3} <= to_fetch(world, other).keys()


def test_a_node_that_reports_success_without_the_files_is_asked_once() -> None:
    world = snapshot_due("a", "b")
    world.step()
    report_written(world)
    for node in "ab":
        report_files(world, node, 2, [])
    assert world.events(ev.SnapshotWritten)[-1].holders == {"a": ((0, 2),), "b": ((2, 4),)}


def test_a_snapshot_is_given_up_when_its_only_writer_is_lost() -> None:
    world = snapshot_due("a", "b")
    world.join("c")
    world.step()
    assert world.state.safekeeping.snapshot is not None
    report_written(world, "b")
    world.lose("a")
    assert world.state.safekeeping.snapshot is None
    assert world.events(ev.SnapshotWritten) == []


def test_a_writer_that_reconnects_is_not_waited_for() -> None:
    world = snapshot_due("a", "b", "c")  # a and b are replicas of the first stage
    world.step()
    report_written(world, "a", "c")
    world.greet("b")  # on a new stream; it may have missed the commit
    assert sorted(itertools.chain(*all_to_fetch(world).values())) == [0, 1, 2, 3]


def three_and_one(nodes: Iterable[str]) -> Plan:
    """The first half of the layers on all nodes but the last, which has the second half."""
    *first, last = sorted(nodes)
    half = LAYERS // 2
    stages = [Stage((0, half), tuple(first), ()), Stage((half, LAYERS), (last,), ())]
    return from_routes(0, stages, [([first[0], last], 4)])


@pytest.mark.parametrize("first", ["a", "liar"])
def test_a_file_that_differs_from_most_replicas_files_does_not_count_even_if_reported_first(first: str) -> None:
    world = snapshot_due("a", "b", "liar", "z", planner=three_and_one)
    world.step()
    wrong = [b"x" * 32] * BUCKETS
    for node in sorted(["a", "b", "liar"], key=lambda node: node != first):
        if node == "liar":
            report_files(world, node, 2, [0, 1], digests=wrong)
        else:
            report_files(world, node, 2, [0, 1])
    report_written(world, "z")
    assert [(e.node, e.charge, e.undecided) for e in world.events(ev.NodeQuarantined)] == [
        ("liar", Charge.SNAPSHOT, False)
    ]
    tally = world.state.safekeeping.snapshot
    assert tally is not None
    assert [tally.parts[bucket].digest for bucket in (0, 1)] == [DIGESTS[bucket].hex() for bucket in (0, 1)]
    assert on_disk(world.state, 2, [0, 1]) == {0: ("a", "b"), 1: ("a", "b")}


def test_of_two_replicas_that_wrote_different_files_neither_counts_and_they_are_kept_apart() -> None:
    world = snapshot_due("a", "b", "c")
    world.step()
    report_written(world, "a", "c")
    report_files(world, "b", 2, [0, 1], digests=[b"x" * 32] * BUCKETS)
    assert world.events(ev.NodeQuarantined) == []
    assert kept_apart(world.state.ledger) == {("a", "b")}
    assert on_disk(world.state, 2, [0, 1]) == {}


@pytest.mark.parametrize(
    ("reported", "words"),
    [
        (wire.Moved(step=2, parts=parts([1]) * 2), "parts is 2"),
        (wire.Moved(step=2, parts=[wire.Part(bucket=BUCKETS, digest=DIGESTS[0])]), "parts.bucket"),
        (wire.Moved(step=2, parts=[wire.Part(bucket=1, digest=b"short")]), "parts.digest"),
        (
            wire.Moved(step=2, parts=[wire.Part(bucket=1, digest=DIGESTS[1], size_bytes=1 << 60)]),
            "parts.size_bytes",
        ),
    ],
)
def test_impossible_snapshot_files_are_refused(reported: wire.Moved, words: str) -> None:
    world = snapshot_due("a", "b")
    world.step()
    world.hear("a", moved=reported)
    assert words in world.last_to("a", "refusal").sentence


def test_a_writer_may_report_only_its_own_layers() -> None:
    world = snapshot_due("a", "b")
    world.step()
    report_files(world, "a", 2, [0, 2])
    assert "parts.bucket is 2; it must be of the node's layers, 0 to 1" in world.last_to("a", "refusal").sentence


def test_claims_of_snapshots_of_too_many_steps_are_refused() -> None:
    world = snapshot_due("a", "b")
    world.prepare("c", prepared(on_disk=[wire.Moved(step=step) for step in range(5)]))
    assert "on_disk is 5" in world.last_to("c", "refusal").sentence


def test_files_that_were_not_asked_for_are_ignored() -> None:
    world = snapshot_due("a", "b")
    report_files(world, "a", 1, [0, 1])
    world.step()
    report_files(world, "a", 7, [0, 1])
    report_written(world, "a")
    report_files(world, "a", 2, [2, 3])
    report_written(world, "b")
    assert world.state.members.sessions["a"].on_disk == {2: frozenset({0, 1})}


def prepare_with(world: World, node: str, on_disk: wire.Moved) -> None:
    """The node has this on its disk, and has still to measure its links."""
    world.prepare(node, prepared(on_disk=[on_disk]), incarnation=3)
    assert world.heard_by(node)[-1].WhichOneof("message") == "probe"


def test_a_node_that_still_measures_its_links_is_told_what_to_keep_too() -> None:
    world = with_snapshot()
    prepare_with(world, "c", claim(3, [0]))
    world.now += PAUSE
    world.step()
    report_written(world, "a", "b")
    report_fetched(world, 6)
    assert world.last_to("c", "keep") == wire.Keep(steps=[6])
    assert world.state.members.sessions["c"].on_disk == {}


def test_files_without_digests_do_not_count_for_a_snapshot_under_way() -> None:
    world = snapshot_due("a", "b")
    world.step()
    report_written(world, "a")
    prepare_with(world, "c", claim(2, range(BUCKETS)))
    assert world.last_to("c", "keep") == wire.Keep(steps=[2])
    report_written(world, "b")
    assert (to_fetch(world, "a"), to_fetch(world, "b")) == ({2: ["b"], 3: ["b"]}, {0: ["a"], 1: ["a"]})

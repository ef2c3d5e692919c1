"""Checkpoints: which nodes send which files, when a checkpoint is whole, and retries: `core/copies/checkpoints.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.copies.checkpoints import LEAST_BANDWIDTH, LINE_FRACTION
from dtfm.coordinator.core.phases import Stepping, Switching
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.answers import FILE_DIGEST, uploaded
from tests.coordinator.script import BUCKETS, LEASE, MANIFEST, World, prepared, training
from tests.coordinator.snapshots import claim, with_snapshot

WEIGHTS: dict[str, Any] = {"uri": "coordinator:"}
"""The run file's default: only weights are sent to the coordinator's disk."""


def checkpoint_under_way(*nodes: str, **changes: Any) -> World:
    """The snapshot of step 2 is written, and nodes are about to send it from their disks. a and b have half of the layers each.
    So does each other node, if there are more."""
    world = training(*(nodes or "ab"), **{"train": {"steps": 100, "evaluate_every": 0}, **changes})
    world.step()
    world.step()
    world.write_snapshot()
    return world


def to_send(world: World) -> dict[str, list[int]]:
    """By node, the buckets that it is sending."""
    upload = world.state.safekeeping.upload
    assert upload is not None
    return {node: sorted(move.buckets) for node, move in sorted(upload.moves.by_node.items()) if move.buckets}


def refused(world: World, node: str) -> str:
    return str(world.last_to(node, "refusal").sentence)


def test_once_all_have_written_each_bucket_is_sent_by_one_node_that_has_it() -> None:
    world = training("a", "b", "c", train={"steps": 100})  # a and b are replicas of the first stage
    world.step()
    world.step()
    world.write_snapshot("a", "b")
    assert world.state.safekeeping.upload is None
    world.write_snapshot("c")
    assert to_send(world) == {"a": [0], "b": [1], "c": [2, 3]}
    message = world.last_to("b", "move")
    assert (message.step, message.folder, message.weights) == (2, "memory://checkpoints/step-00000002", False)
    assert [(part.bucket, part.size_bytes, part.digest) for part in message.parts] == [(1, 10, FILE_DIGEST)]


def test_it_is_whole_when_all_files_have_come_and_the_manifest_is_written() -> None:
    world = checkpoint_under_way()
    world.send_files("a")
    assert world.manifests == []
    world.send_files("b")
    assert [(manifest.step, len(manifest.files)) for manifest in world.manifests] == [(2, BUCKETS)]
    assert "checkpoint_written" not in world.names()
    assert not world.tidied  # the older ones may still be needed
    world.feed(t.ManifestDone(2, "", digest=MANIFEST))
    assert world.state.ledger.copies.checkpoints.keys() == {2}
    run_id = world.state.ledger.run_id
    assert world.tidied == [t.TidyCheckpoints("memory://checkpoints", run_id, 2, 3, frozenset(), frozenset())]
    assert world.refolded() == world.state.ledger


def test_training_goes_on_meanwhile_and_may_use_part_of_the_line() -> None:
    world = checkpoint_under_way()
    assert isinstance(world.state.phase, Stepping)
    assert world.last_to("a", "move").bytes_per_second == LINE_FRACTION * 1e9
    world.step()


def test_nodes_of_one_machine_share_the_part_of_its_line_for_a_checkpoint() -> None:
    world = training("a", "b", "c", train={"steps": 100})
    world.belong_together("a", "b")
    reach = world.state.ledger.reach
    within = {"a": {**reach.links["a"], "b": replace(reach.links["a"]["b"], bandwidth=9e9, way="loopback")}}
    reach = replace(reach, links={**reach.links, **within})
    world.state = replace(world.state, ledger=replace(world.state.ledger, reach=reach))
    world.step()
    world.step()
    world.write_snapshot()
    rates = {node: world.last_to(node, "move").bytes_per_second for node in to_send(world)}
    assert rates == {"a": LINE_FRACTION * 1e9 / 2, "b": LINE_FRACTION * 1e9 / 2, "c": LINE_FRACTION * 1e9}


def test_a_node_without_measured_links_is_not_slowed_down_to_nothing() -> None:
    world = training(train={"steps": 100})
    world.step()
    world.step()
    unknown = replace(world.state.ledger.reach, links={})
    world.state = replace(world.state, ledger=replace(world.state.ledger, reach=unknown))
    world.write_snapshot()
    assert world.last_to("a", "move").bytes_per_second == LEAST_BANDWIDTH


def test_after_the_last_step_it_may_use_the_whole_line() -> None:
    world = training(train={"steps": 1})
    world.step()
    world.write_snapshot()
    assert world.last_to("a", "move").bytes_per_second == 0


@pytest.mark.parametrize(
    "fails",
    [
        lambda world: world.send_files("a", problem="no route to the bucket"),
        lambda world: world.lose("a"),
        lambda world: world.hear("a", uploaded(2, {0: (10, bytes([1]) * 32)})),
    ],
    ids=["it cannot", "it is lost", "it sent another file than that on its disk"],
)
def test_what_a_node_does_not_send_is_sent_by_another_that_has_it(fails: Callable[[World], None]) -> None:
    world = checkpoint_under_way("a", "b", "c")
    fails(world)
    assert to_send(world) == {"b": [0, 1], "c": [2, 3]}
    assert [part.bucket for part in world.last_to("b", "move").parts] == [0]
    assert world.events(ev.CheckpointFailed) == []


def test_what_a_node_does_not_send_in_time_is_sent_by_another() -> None:
    world = checkpoint_under_way("a", "b", "c")
    world.send_files("b", "c")
    world.without_deadline()
    world.wait(world.state.patience + 1, beating="abc")
    assert to_send(world) == {"b": [0]}
    world.hear("a", uploaded(2, {0: (10, FILE_DIGEST)}))
    assert world.manifests == [], "its turn is over"
    world.send_files("b")
    assert len(world.manifests) == 1


def test_what_is_on_no_disk_here_is_waited_for_a_while_as_its_node_may_come_back() -> None:
    world = checkpoint_under_way()
    world.send_files("a")
    world.lose("b")
    assert "bucket 2 is on no disk that is here" in world.events(ev.CheckpointFailed)[-1].reason
    world.wait(20 * LEASE, beating="a")
    assert world.state.safekeeping.upload is not None
    world.wait(100 * LEASE, beating="a")
    assert world.state.safekeeping.upload is None


def test_a_damaged_file_of_the_last_snapshot_is_written_again() -> None:
    world = training(train={"steps": 1, "evaluate_every": 0})
    world.step()
    world.evaluate()
    world.apply()
    world.write_snapshot()
    for _ in range(6):
        while (upload := world.state.safekeeping.upload) is not None and upload.moves.under_way:
            world.send_files(problem="bucket 0 is damaged")
        if isinstance(world.state.phase, Switching):
            break
        world.wait(50 * LEASE, beating="ab")
    world.settle()
    assert world.last_to("a", "commit").snapshot
    assert world.state.safekeeping.snapshot is not None


def test_if_nobody_can_send_it_is_tried_again_ever_more_seldom_and_says_why() -> None:
    world = checkpoint_under_way()
    waits = []
    for _ in range(3):
        for node in "ab":
            world.send_files(node, problem="OSError: the bucket is gone")
        assert to_send(world) == {}
        reason = world.events(ev.CheckpointFailed)[-1].reason
        assert "b: OSError: the bucket is gone; it is tried again in" in reason
        upload = world.state.safekeeping.upload
        assert upload is not None
        assert upload.again is not None
        waits.append(upload.again - world.now)
        world.wait(waits[-1] + 1, beating="ab")
        assert to_send(world) == {"a": [0, 1], "b": [2, 3]}
    assert waits == [2 * LEASE, 4 * LEASE, 8 * LEASE]
    world.send_files()
    assert len(world.manifests) == 1


def test_of_a_file_that_is_not_right_another_node_sends_its_own() -> None:
    world = checkpoint_under_way("a", "b", "c")
    world.send_files()
    world.feed(t.ManifestDone(2, "bucket 0 is not what it should be", bucket=0))
    assert to_send(world) == {"b": [0]}
    world.send_files()
    world.feed(t.ManifestDone(2, "", digest=MANIFEST))
    assert world.state.ledger.copies.checkpoint_step == 2


def test_a_checkpoint_that_is_due_waits_for_the_one_that_is_under_way() -> None:
    world = checkpoint_under_way()
    for _ in range(2):
        world.step()
        assert not world.last_to("a", "commit").snapshot
    world.save()
    world.step()
    assert world.last_to("a", "commit").snapshot
    assert world.state.ledger.training.step == 5


def test_one_that_is_in_trouble_gives_way_to_the_next() -> None:
    world = checkpoint_under_way()
    for node in "ab":
        world.send_files(node, problem="no room")
    world.step()
    world.step()
    world.write_snapshot()
    upload = world.state.safekeeping.upload
    assert upload is not None
    assert upload.step == 4
    world.save()
    assert world.tidied[-1].given_up == {2}  # what there is of it goes, as nobody will finish it
    assert world.state.safekeeping.unfinished == frozenset()


def test_the_last_one_does_not_wait_for_one_under_way() -> None:
    world = checkpoint_under_way(train={"steps": 3, "evaluate_every": 0})
    world.step()
    assert world.last_to("a", "commit").snapshot
    assert "it was not done when training came to an end" in world.events(ev.CheckpointFailed)[-1].reason
    world.evaluate()
    world.apply()
    world.save()
    assert world.exit_code == 0


def test_a_run_with_weights_alone_is_over_once_its_state_is_on_two_disks_as_well() -> None:
    world = training(train={"steps": 1, "evaluate_every": 0}, checkpoint=WEIGHTS)
    world.step()
    world.evaluate()
    world.apply()
    world.save()
    assert world.state.ledger.copies.checkpoints[1].weights
    assert world.exit_code is None
    for node, fetched in (("a", [2, 3]), ("b", [0, 1])):
        parts = [wire.Part(bucket=bucket, size_bytes=10, digest=FILE_DIGEST) for bucket in fetched]
        world.hear(node, moved=wire.Moved(step=1, parts=parts))
    assert world.events(ev.SnapshotWritten)[-1].holders == {"a": ((0, 4),), "b": ((0, 4),)}
    assert world.exit_code == 0


def test_training_does_not_go_back_to_weights_alone_which_stay() -> None:
    world = checkpoint_under_way(checkpoint={**WEIGHTS, "every": 2})
    world.save()
    assert world.state.ledger.copies.checkpoint_step == 2
    world.step()
    world.lose("a")
    world.lose("b")
    world.join("c", "d")
    world.wait(100 * LEASE, beating="cd")
    assert world.events(ev.RolledBack) == []
    assert world.events(ev.Waiting)[-1].asks
    assert all(2 not in tidied.given_up for tidied in world.tidied)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (uploaded(2, {BUCKETS: (1, FILE_DIGEST)}), "parts.bucket"),
        (uploaded(2, {1: (1, b"short")}), "parts.digest"),
        (uploaded(2, {1: (1 << 51, FILE_DIGEST)}), "parts.size_bytes"),
        (uploaded(2, {1: (1, FILE_DIGEST)}, moments=bytes(64)), "parts.moments"),
        (
            wire.NodeMessage(
                moved=wire.Moved(step=2, parts=[wire.Part(digest=FILE_DIGEST, nonce="../x")], in_checkpoint=True)
            ),
            "nonce",
        ),
    ],
)
def test_files_that_no_checkpoint_can_have_are_refused(message: wire.NodeMessage, words: str) -> None:
    world = checkpoint_under_way()
    world.hear("a", message)
    assert words in refused(world, "a")


@pytest.mark.parametrize(("momentum", "size"), [(0.0, 64), (0.9, 96)])
def test_weights_come_with_the_digests_of_the_rest_of_the_state(momentum: float, size: int) -> None:
    world = checkpoint_under_way(checkpoint={**WEIGHTS, "every": 2}, train={"outer_momentum": momentum})
    world.hear("a", uploaded(2, {0: (10, FILE_DIGEST)}, moments=bytes(size)))
    assert not world.refusals
    world.hear("a", uploaded(2, {0: (10, FILE_DIGEST)}, moments=bytes(size - 32)))
    assert "parts.moments" in refused(world, "a")


def test_files_that_a_node_was_not_to_send_do_not_count() -> None:
    world = checkpoint_under_way()
    world.hear("a", uploaded(2, {3: (10, FILE_DIGEST)}))
    world.hear("a", uploaded(1, {0: (10, FILE_DIGEST)}))
    upload = world.state.safekeeping.upload
    assert upload is not None
    assert upload.files == {}


def test_the_snapshot_behind_a_checkpoint_stays_on_disks_beside_the_last_one_that_is_spread() -> None:
    """Each bucket of it is on one machine alone, but if all nodes are started again, nothing else is as new."""
    world = with_snapshot(checkpoint={**WEIGHTS, "every": 6})
    world.step()
    world.write_checkpoint()
    assert [(event.step, event.spread) for event in world.events(ev.SnapshotWritten)] == [(3, True), (6, False)]
    assert list(world.last_to("a", "keep").steps) == [3, 6]
    for node in "ab":
        world.lose(node)
    for incarnation, (node, half) in enumerate((("a", [0, 1]), ("b", [2, 3])), 2):
        claims = [claim(3, range(BUCKETS)), claim(6, half)]
        world.prepare(node, prepared(on_disk=claims), incarnation=incarnation)
        world.report_links(node)
    world.wait(LEASE, beating="ab")
    assert world.state.ledger.training.step == 6
    assert [list(part.nodes) for part in world.last_to("a", "assignment").snapshot.parts] == [["a"]] * 2 + [["b"]] * 2

"""The held-out loss, the checkpoint and the pause that follow a commit: `core/stepping/post_commit.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.step.evaluation import MOST_EVALUATIONS
from dtfm.coordinator.core.transition import ManifestDone
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.answers import DIGEST, FILE_DIGEST, snapshot_parts
from tests.coordinator.script import BUCKETS, LAYERS, LEASE, World, fresh_state, prepared, training


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_held_out_loss_that_is_not_finite_is_ignored_and_drops_nobody(value: float) -> None:
    world = training()
    world.step()
    world.step()
    world.hear("b", evaluated=wire.Evaluated(generation=1, step=2, losses=[2.0, 2.0, value, 2.0]))
    assert set(world.state.members.sessions) == {"a", "b"}
    assert not world.events(ev.Evaluated)
    world.step()
    assert world.events(ev.StepCommitted)[-1].step == 3


def test_losing_a_peer_stream_during_the_last_evaluation_does_not_fail_the_run() -> None:
    world = training()
    for _ in range(3):
        world.step()
    world.apply()
    world.save()
    assert world.exit_code is None
    world.fail_step("a", wire.PEER_LOST, peer="b", step=4)
    assert world.exit_code == 0
    assert not world.events(ev.StepAborted)


def test_who_has_no_part_in_a_held_out_loss_cannot_end_it() -> None:
    world = training()
    world.stick_to_plan()
    world.join("c")
    for _ in range(3):
        world.step()
    assert 3 in world.state.evaluations
    world.fail_step("c", wire.INTERNAL)
    assert 3 in world.state.evaluations
    world.fail_step("a", wire.INTERNAL)
    assert 3 not in world.state.evaluations


def test_a_checkpoint_is_whole_when_all_its_buckets_are_written() -> None:
    world = training()
    world.step()
    world.step()
    world.write_checkpoint("a")
    assert world.manifests == []
    world.write_checkpoint("b")
    assert world.manifests[-1].step == 2
    assert "checkpoint_written" not in world.names()
    assert not world.tidied  # the older ones may still be needed
    world.feed(t.ManifestDone(2, ""))
    assert world.state.ledger.copies.checkpoints.keys() == {2}
    assert world.tidied == [
        t.TidyCheckpoints("memory://checkpoints", world.state.ledger.run_id, 2, 3, frozenset(), frozenset())
    ]


@pytest.mark.parametrize(
    "changes",
    [{"bucket": 4}, {"bucket": 2}, {"digest": b""}, {"size_bytes": 1 << 51}],  # 2 is of the other stage
)
def test_an_impossible_checkpoint_bucket_is_refused(changes: dict[str, object]) -> None:
    world = training()
    world.step()
    world.step()
    fields = {"bucket": 1, "size_bytes": 1, "digest": FILE_DIGEST}
    part = wire.Part(**{**fields, **changes})  # type: ignore[arg-type]
    stream = world.streams["a"]
    world.hear("a", snapshot_parts=wire.SnapshotParts(step=2, destination=wire.CHECKPOINT, parts=[part]))
    assert world.said[stream][-1].refusal.reason == wire.MALFORMED


def test_a_checkpoint_does_not_wait_for_replicas_that_write_nothing() -> None:
    world = training("a", "b", "b2", "c", "d", "e", cluster={"nodes": 6, "stages": 2})  # b2 and d have nothing to write
    world.step()
    world.step()
    world.write_checkpoint("a", "b", "c", "e")
    assert [manifest.step for manifest in world.manifests] == [2]
    world.write_checkpoint("b")
    world.lose("b")
    world.feed(t.ManifestDone(2, ""))
    assert len(world.manifests) == 1
    assert world.state.ledger.copies.checkpoint_step == 2


def with_a_shared_bucket() -> World:
    """a trains the first half of the layers and b the second, and both bucket 4. A checkpoint of step 2 is under way."""
    world = World()
    for node in "ab":
        world.prepare(node, prepared(buckets=LAYERS + 1))
        world.report_links(node)
    world.wait(LEASE, beating="ab")
    world.settle()
    world.step()
    world.step()
    return world


def test_a_disputed_checkpoint_replaces_no_older_one() -> None:
    """Either may be the one that writes what they share."""
    world = with_a_shared_bucket()
    for node, layers, digest in (("a", (0, 1), FILE_DIGEST), ("b", (2, 3), bytes([1]) * 32)):
        files = {**dict.fromkeys(layers, (10, FILE_DIGEST)), LAYERS: (10, digest)}
        world.hear(node, snapshot_parts(2, wire.CHECKPOINT, files))
    world.feed(t.ManifestDone(2, ""))
    assert world.state.ledger.copies.checkpoint_step == 2
    assert not world.tidied


def test_who_answers_first_does_not_write_the_parts_of_others_into_a_checkpoint() -> None:
    """Of the first stage a writes bucket 0, and b bucket 1."""
    world = training("a", "b", "c")
    world.step()
    world.step()
    world.hear("a", snapshot_parts(2, wire.CHECKPOINT, {0: (10, FILE_DIGEST), 1: (10, bytes([1]) * 32)}))
    world.write_checkpoint("b", "c")
    assert [part.digest for part in world.manifests[-1].parts] == [FILE_DIGEST.hex()] * BUCKETS
    world.feed(t.ManifestDone(2, ""))
    assert world.tidied, "it is not disputed"


def test_a_checkpoint_whose_parts_do_not_come_is_given_up() -> None:
    world = training("a", "b", train={"steps": 100, "evaluate_every": 0}, checkpoint={"every": 3})
    for _ in range(3):
        world.step()
    world.write_checkpoint("a")
    for seconds in (60 * LEASE, 50 * LEASE):
        world.step()
        world.wait(seconds, beating="ab")
    assert "b did not write its part within" in world.events(ev.CheckpointFailed)[-1].reason
    while world.state.ledger.training.step % 3:
        world.step()
    world.save()
    (tidied,) = world.tidied
    assert tidied.given_up == {3}  # what there is of it goes, as nobody will finish it
    assert world.state.safekeeping.unfinished == frozenset()


@pytest.mark.parametrize(("held_out", "expected"), [(1, "c"), (2, "cd"), (8, "cd")])
def test_nodes_that_end_the_chains_of_held_out_micro_batches_report_the_loss(held_out: int, expected: str) -> None:
    """Training micro-batches 0 and 2 end on c, 1 and 3 on d; the held-out ones travel their chains in turn."""
    train = {"evaluate_every": 1, "evaluation_samples": 2 * held_out}

    def plan(_: Iterable[str]) -> Plan:
        stages = (Stage((0, 2), ("a", "b"), ()), Stage((2, LAYERS), ("c", "d"), ()))
        return from_routes(0, stages, [(("a", "c"), 2), (("b", "d"), 2)])

    world = World(fresh_state(cluster={"nodes": 4}, train={"steps": 10, **train}), plan)
    world.join(*"abcd")
    world.settle()
    world.step()
    (evaluation,) = world.state.evaluations.values()
    assert sorted(number for numbers in evaluation.expected.values() for number in numbers) == list(range(held_out))
    assert evaluation.expected.keys() == set(expected)
    for node, due in evaluation.expected.items():
        world.hear(node, evaluated=wire.Evaluated(generation=1, step=1, losses=[4.0] * len(due)))
    assert [event.samples for event in world.events(ev.Evaluated)] == [2 * held_out]


def test_a_held_out_loss_over_no_samples_is_given_up() -> None:
    world = training("a", "b", train={"steps": 100, "evaluate_every": 2})
    world.step()
    world.step()
    node = world.plan_in_force.stages[-1].replicas[-1]
    world.hear(node, evaluated=wire.Evaluated(generation=1, step=2))
    assert world.state.evaluations == {}
    for _ in range(20):
        world.step()
    assert len(world.state.evaluations) <= MOST_EVALUATIONS


def test_a_failed_checkpoint_does_not_stop_training() -> None:
    world = training()
    world.step()
    world.step()
    world.write_checkpoint("a", problem="disk full")
    assert "disk full" in world.events(ev.CheckpointFailed)[-1].reason
    world.write_checkpoint("b")  # the checkpoint has failed already
    assert world.manifests == []
    assert isinstance(world.state.phase, Stepping)


def test_losing_a_node_after_the_last_step_is_harmless_once_its_part_is_written() -> None:
    world = training(train={"steps": 1})
    world.step()
    world.evaluate()
    world.write_checkpoint()
    world.lose("b")
    world.hear("a", applied=wire.Applied(generation=1, step=1, state_digest=DIGEST))
    assert world.exit_code is None
    world.feed(ManifestDone(1, ""))
    assert world.exit_code == 0


def test_losing_a_stage_before_the_last_checkpoint_is_whole_means_training_again() -> None:
    world = training("a", "b", train={"steps": 3})
    world.step()
    world.step()
    world.save()
    world.step()
    world.lose("b")
    assert world.events(ev.CheckpointFailed)[-1].step == 3
    world.join("b2")
    assert world.events(ev.RolledBack)[-1].step == 2
    world.settle()
    world.finish_run()
    assert world.exit_code == 0


def test_losing_a_replica_while_the_last_checkpoint_is_written_makes_the_others_write_it_again() -> None:
    world = training("a", "b", "c", train={"steps": 1})
    world.step()
    world.lose("a")
    world.settle()
    assert world.last_to("b", "commit").snapshot == wire.CHECKPOINT
    world.evaluate()
    world.apply()
    world.save()
    assert world.exit_code == 0

"""From ready nodes to a finished run: plans, votes, commits, what follows them."""

from __future__ import annotations

import math

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.state import Gathering, Pausing, Stepping, Switching
from dtfm.coordinator.core.tick import tick
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.answers import DIGEST, FILE_DIGEST
from tests.coordinator.script import LEASE, World, fresh_state, training, two_stages


def test_training_waits_for_the_number_of_nodes_in_the_run_file() -> None:
    world = World(fresh_state(cluster={"nodes": 3}))
    world.join("a", "b")
    assert world.state.ledger.plan is None
    assert world.events(ev.Waiting)[-1].reason == "2 of 3 nodes are ready"
    world.join("c")
    assert world.state.ledger.plan is not None


def test_a_plan_goes_to_every_ready_node_and_begins_when_its_nodes_are_ready() -> None:
    world = World()
    world.join("a", "b")
    assert isinstance(world.state.phase, Switching)
    assignment = world.last_to("a", "assignment")
    assert assignment.plan.generation == 1
    assert [peer.node for peer in assignment.peers] == ["a", "b"]
    assert (assignment.step, assignment.snapshot.folder) == (0, "")
    assert [list(donors.nodes) for donors in assignment.donors] == [[], [], [], []]
    world.hear("a", plan_ready=wire.PlanReady(generation=1))
    assert "begin" not in world.kinds_to("a")
    world.hear("b", plan_ready=wire.PlanReady(generation=1))
    assert world.last_to("a", "begin") == world.last_to("b", "begin") == wire.Begin(generation=1, step=1)


def test_a_commit_is_in_the_log_before_any_node_hears_of_it() -> None:
    world = training()
    world.vote("a")
    vote = wire.StepReady(generation=1, step=1, squared_gradient_norm=2.0, loss_sum=4.0, samples=8, state_digest=DIGEST)
    _, ready = tick(world.state, t.Heard(world.streams["b"], wire.NodeMessage(step_ready=vote)), world.now)
    assert [entry.event for entry in ready.entries] == ["step_committed"]
    assert [type(command) for command in ready.commands] == [t.Send, t.Send]


def test_a_commit_carries_the_whole_models_norm_and_mean_loss() -> None:
    world = training()
    world.now += 2.0
    world.step()
    committed = world.events(ev.StepCommitted)[-1]
    assert (committed.step, committed.generation, committed.samples, committed.tokens) == (1, 1, 8, 128)
    assert committed.loss == 0.5
    assert committed.gradient_norm == 2.0  # two stages, 2.0 squared each
    assert committed.seconds == 2.0
    commit = wire.Commit(generation=1, step=1, gradient_norm=2.0)
    assert world.last_to("a", "commit") == world.last_to("b", "commit") == commit


def test_a_run_trains_evaluates_checkpoints_and_finishes() -> None:
    world = training()
    world.step()
    world.step()
    commit = world.last_to("a", "commit")
    assert (commit.evaluate, commit.snapshot == wire.CHECKPOINT, commit.pause) == (True, True, False)
    world.evaluate()
    world.save()
    world.step()
    commit = world.last_to("a", "commit")
    assert (commit.evaluate, commit.snapshot == wire.CHECKPOINT, commit.pause) == (True, True, True)
    assert world.exit_code is None
    world.evaluate()
    world.save()
    assert world.exit_code is None
    world.apply()
    assert world.exit_code == 0
    assert world.last_to("a", "finish").completed
    assert [event.step for event in world.events(ev.StepCommitted)] == [1, 2, 3]
    assert [(event.step, event.loss) for event in world.events(ev.Evaluated)] == [(2, 2.0), (3, 2.0)]
    assert [event.folder for event in world.events(ev.CheckpointWritten)] == [
        "memory://checkpoints/step-00000002",
        "memory://checkpoints/step-00000003",
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_held_out_loss_that_is_not_finite_is_ignored_and_drops_nobody(value: float) -> None:
    world = training()
    world.step()
    world.step()
    world.hear("b", evaluated=wire.Evaluated(generation=1, step=2, loss_sum=value, samples=8))
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


def test_votes_of_another_step_or_generation_do_not_count() -> None:
    world = training()
    world.vote("a", step=2)
    world.vote("a", generation=7)
    world.vote("b")
    assert world.state.ledger.step == 0
    world.vote("b", loss_sum=400.0)  # a second vote of the same node
    world.vote("a")
    assert world.events(ev.StepCommitted)[-1].loss == 0.5


@pytest.mark.parametrize("field", ["loss_sum", "squared_gradient_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_vote_that_is_not_finite_aborts_the_step(field: str, value: float) -> None:
    world = training()
    world.vote("a", **{field: value})
    assert world.events(ev.StepAborted)[-1].problem == "NON_FINITE"
    assert world.last_to("b", "abort").step == 1
    assert world.state.ledger.step == 0


def test_a_nan_step_is_tried_again_with_the_same_plan_and_the_third_failure_ends_the_run() -> None:
    world = training()
    world.step()
    for attempt in (1, 2, 3):
        world.fail_step("b", wire.NON_FINITE)
        aborted = world.events(ev.StepAborted)[-1]
        assert (aborted.step, aborted.problem, aborted.node) == (2, "NON_FINITE", "b")
        if attempt < 3:
            assert world.last_to("a", "assignment").plan.generation == attempt + 1
            world.settle()
            assert world.last_to("a", "begin") == wire.Begin(generation=attempt + 1, step=2)
    assert world.exit_code == 1
    finish = world.last_to("a", "finish")
    assert not finish.completed
    assert "3 attempts in a row failed at step 2: NON_FINITE on b: scripted. Lower train.learning_rate" in finish.reason


def test_only_failures_in_a_row_count() -> None:
    world = training(train={"steps": 20})
    for _ in range(5):
        world.fail_step("a", wire.OUT_OF_MEMORY)
        world.settle()
        world.step()
    assert world.exit_code is None
    assert world.state.ledger.step == 5


def test_the_state_of_a_retry_comes_from_its_holders() -> None:
    world = training()
    world.step()
    world.fail_step("a", wire.INTERNAL)
    assignment = world.last_to("a", "assignment")
    assert assignment.step == 1
    assert [list(donors.nodes) for donors in assignment.donors] == [["a"], ["a"], ["b"], ["b"]]


def test_replicas_with_different_state_end_the_run() -> None:
    world = training("a", "b", "c")  # a and b are replicas
    world.vote("a")
    world.vote("b", state_digest=b"something else")
    world.vote("c")
    mismatch = world.events(ev.DigestMismatch)[-1]
    assert (mismatch.step, mismatch.stage, set(mismatch.digests)) == (1, 0, {"a", "b"})
    assert world.exit_code == 1
    assert world.state.ledger.step == 0


def test_replicas_with_different_gradients_end_the_run() -> None:
    world = training("a", "b", "c")
    world.vote("a")
    world.vote("b", squared_gradient_norm=2.1)
    world.vote("c")
    assert "different gradients" in world.events(ev.RunFailed)[-1].reason


def test_a_step_that_does_not_count_every_sample_once_ends_the_run() -> None:
    world = training()
    world.vote("a")
    world.vote("b", samples=7)
    assert "step 1 counted 7 samples, not 8" in world.events(ev.RunFailed)[-1].reason
    assert world.state.ledger.step == 0


def test_a_link_whose_stream_breaks_three_times_is_given_up() -> None:
    world = training()
    for _ in range(2):
        world.fail_step("a", wire.PEER_LOST, peer="b")
        assert isinstance(world.state.phase, Switching)
        world.settle()
    world.automatic_planning = False
    world.fail_step("a", wire.PEER_LOST, peer="b")
    assert isinstance(world.state.phase, Gathering)
    assert world.wanted[-1].cluster.bandwidth.tolist() == [[0, 0], [0, 0]]
    assert world.exit_code is None


def test_a_plan_that_cannot_start_is_adopted_again_and_the_third_failure_ends_the_run() -> None:
    world = World()
    world.join("a", "b")
    for generation in (1, 2, 3):
        world.hear("b", plan_failed=wire.PlanFailed(generation=generation, problem="no memory"))
    assert [event.generation for event in world.events(ev.PlanAdopted)] == [1, 2, 3]
    assert world.exit_code == 1
    assert "because of b: no memory" in world.last_to("a", "finish").reason


def test_messages_about_an_older_plan_are_ignored() -> None:
    world = World()
    world.join("a", "b")
    world.hear("a", plan_failed=wire.PlanFailed(generation=1, problem="x"))
    world.hear("a", plan_failed=wire.PlanFailed(generation=1, problem="late"))
    world.hear("a", plan_ready=wire.PlanReady(generation=1))
    assert world.state.phase == Switching(frozenset({"a", "b"}), world.now + 100 * LEASE)


def test_the_run_waits_for_more_nodes_if_no_plan_fits_those_it_has() -> None:
    world = World(planner=lambda ids: "too little memory" if len(list(ids)) < 3 else two_stages(ids))
    world.join("a", "b")
    assert world.events(ev.Waiting)[-1].reason == "too little memory"
    world.wait(LEASE, beating=["a", "b"])
    assert len([e for e in world.events(ev.Waiting) if "too little" in e.reason]) == 1  # not again and again
    world.join("c")
    assert world.state.ledger.generation == 1


def test_a_run_that_no_nodes_could_train_fails() -> None:
    world = World()
    world.automatic_planning = False
    world.join("a", "b")
    world.feed(t.Planned(world.wanted[-1].number, "stages is 9; the model has 4 layers", hopeless=True))
    assert world.exit_code == 1


def test_a_step_past_its_deadline_is_aborted_even_if_heartbeats_arrive() -> None:
    world = training()
    world.vote("a")
    world.wait(101 * LEASE, beating=["a", "b"])
    aborted = world.events(ev.StepAborted)[-1]
    assert (aborted.problem, aborted.node) == ("INTERNAL", "b")
    assert "no vote from b within 1000 seconds" in aborted.reason


def test_a_plan_past_its_deadline_fails_even_if_heartbeats_arrive() -> None:
    world = World()
    world.join("a", "b")
    world.hear("a", plan_ready=wire.PlanReady(generation=1))
    world.wait(101 * LEASE, beating=["a", "b"])
    assert world.events(ev.PlanFailed)[-1].node == "b"


def test_a_failed_checkpoint_does_not_stop_training() -> None:
    world = training()
    world.step()
    world.step()
    world.write_checkpoint("a", problem="disk full")
    assert "disk full" in world.events(ev.CheckpointFailed)[-1].reason
    world.write_checkpoint("b")  # comes to nothing
    assert world.manifests == []
    assert isinstance(world.state.phase, Stepping)


def test_a_failed_last_checkpoint_fails_the_run() -> None:
    world = training(train={"steps": 1})
    world.step()
    world.write_checkpoint()
    world.feed(t.ManifestDone(1, "not shared between machines"))
    assert world.exit_code == 1
    assert "not shared between machines" in world.last_to("a", "finish").reason


def test_a_checkpoint_is_whole_when_all_its_buckets_are_written() -> None:
    world = training()
    world.step()
    world.step()
    world.write_checkpoint("a")
    assert world.manifests == []
    world.write_checkpoint("b")
    assert world.manifests[-1].step == 2
    assert "checkpoint_written" not in world.names()
    world.feed(t.ManifestDone(2, ""))
    assert world.state.ledger.checkpoints == {2: "memory://checkpoints/step-00000002"}


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


def test_replicas_with_different_state_after_the_last_step_end_the_run() -> None:
    world = training("a", "b", "c", train={"steps": 1})
    world.step()
    world.evaluate()
    world.save()
    for node, digest in (("a", DIGEST), ("b", b"something else"), ("c", DIGEST)):
        world.hear(node, applied=wire.Applied(generation=1, step=1, state_digest=digest))
    assert world.exit_code == 1
    assert world.events(ev.DigestMismatch)[-1].stage == 0


def test_plan_now_changes_the_plan_at_the_next_commit() -> None:
    world = training("a", "b", "c", cluster={"stages": "auto"})
    world.planner = lambda ids: two_stages(list(ids)[:2])
    world.feed(t.PlanNow(5))
    assert world.answers == [t.AnswerPlanNow(5, True, 2, "as scripted")]
    world.step()
    assert world.last_to("a", "commit").pause
    assert isinstance(world.state.phase, Pausing)
    world.apply()
    assert world.last_to("c", "assignment").plan.generation == 2
    assert world.last_to("c", "assignment").step == 1


def test_plan_now_says_so_when_nothing_changes() -> None:
    world = training()
    world.feed(t.PlanNow(5))
    assert world.answers[-1].changed is False
    world.fail_step("a", wire.INTERNAL)
    world.feed(t.PlanNow(6))
    assert "under way" in world.answers[-1].reason


@pytest.mark.parametrize("dismiss", [True, False])
def test_a_stop_is_logged_and_dismisses_the_nodes_if_asked_to(dismiss: bool) -> None:
    world = training()
    world.feed(t.StopAsked("Ctrl-C", dismiss))
    assert world.log[-1] == ev.CoordinatorStopped("Ctrl-C")
    assert world.exit_code == 1
    assert ("finish" in world.kinds_to("a")) == dismiss
    assert (world.streams["a"] in world.hung_up) != dismiss
    world.hear("a", heartbeat=wire.Heartbeat())
    world.greet("c")
    world.lose("b")
    assert world.state.ledger == world.refolded()
    stopped = world.names().index("coordinator_stopped")
    assert set(world.names()[stopped + 1 :]) <= {"node_left"}


def test_finish_run_names_a_step_that_never_comes_about() -> None:
    world = World()
    world.join("a", "b")  # the plan is adopted, and has not begun
    with pytest.raises(AssertionError, match="step 1 does not come about: Switching"):
        world.finish_run()

"""From votes to a commit, or to an abort and another attempt: `core/stepping`."""

from __future__ import annotations

import math

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Gathering
from dtfm.coordinator.core.state.state import ATTEMPTS
from dtfm.coordinator.core.step import commits, votes
from dtfm.coordinator.core.step.commits import learning_rate
from dtfm.coordinator.core.tick import tick
from dtfm.coordinator.core.timeouts import pause_leases
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.protos.clipping import clip_coefficient
from tests.coordinator.answers import DIGEST
from tests.coordinator.script import LAYERS, LEASE, LONG, fresh_state, training
from tests.coordinator.strangers import strangers


def test_a_commit_is_in_the_log_before_any_node_hears_of_it() -> None:
    world = training()
    world.vote("a")
    vote = wire.StepReady(generation=1, step=1, squared_gradient_norm=2.0, loss_sum=4.0, samples=8, state_digest=DIGEST)
    _, ready = tick(world.state, t.Heard(world.streams["b"], wire.NodeMessage(step_ready=vote)), world.now)
    assert [entry.event for entry in ready.entries] == ["step_committed"]
    assert [type(command) for command in ready.commands] == [t.Send, t.Send]


def test_a_commit_carries_the_whole_models_norm_the_mean_loss_and_with_what_the_step_is_applied() -> None:
    world = training()
    world.now += 2.0
    world.step()
    committed = world.events(ev.StepCommitted)[-1]
    assert (committed.step, committed.generation, committed.samples, committed.tokens) == (1, 1, 8, 128)
    assert committed.loss == 0.5
    assert committed.gradient_norm == 2.0  # two stages, 2.0 squared each
    assert committed.seconds == 2.0
    fares = wire.RunStatus(
        step=1,
        steps=3,
        generation=1,
        loss=0.5,
        tokens=128,
        seconds=2.0,
        lease_seconds=LEASE,
        heartbeat_seconds=LEASE / 4,
    )
    rate = learning_rate(world.state.message.train, 1)
    assert rate == committed.learning_rate > 0
    factor = clip_coefficient(2.0, 1.0)
    clips = [
        wire.Commit.Clip(first_layer=first, past_last_layer=first + 2, factor=factor) for first in range(0, LAYERS, 2)
    ]
    commit = wire.Commit(generation=1, step=1, learning_rate=rate, weight_decay=0.1, clips=clips, status=fares)
    assert world.last_to("a", "commit") == world.last_to("b", "commit") == commit


def test_of_a_long_run_the_log_has_the_times_of_some_steps_and_of_the_first_of_each_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commits, "TIMED_STEPS", 2)
    monkeypatch.setattr(commits, "TIMED_EVERY", 4)
    world = training("a", "b", "c", train={"steps": 20})
    for _ in range(8):
        world.step()
    world.lose("a")
    world.settle()
    world.step()
    events = world.events(ev.StepCommitted)
    timed = [event.step for event in events if event.compute_seconds]
    assert [event.step for event in events] == [*range(1, 10)]
    assert timed == [1, 2, 4, 8, 9]
    assert world.state.ledger.training.timed == events[8]


def test_the_log_says_whose_gradients_were_clipped_by_whom() -> None:
    world = strangers("a", "b")
    world.vote("a", clipped=[wire.StepReady.Clipped(node="b", pieces=2, worst=math.inf)])
    world.vote("b")
    assert world.events(ev.GradientsClipped) == [ev.GradientsClipped(1, 1, {"a": {"b": 1e9}})]
    world.step()
    assert len(world.events(ev.GradientsClipped)) == 1


@pytest.mark.parametrize("named", ["a", "ba", "bb", "z"])
def test_a_vote_that_names_whom_it_cannot_have_clipped_is_refused(named: str) -> None:
    """The sums of a node that reports clipping are not repeated. So a node cannot report this about itself: no log would show
    it."""
    world = strangers("a", "b")
    world.vote("a", clipped=[wire.StepReady.Clipped(node=node, pieces=1, worst=2.0) for node in named])
    refusal = world.last_to("a", "refusal")
    assert (refusal.reason, "clipped" in refusal.sentence) == (wire.MALFORMED, True)


def test_among_people_who_know_each_other_nobody_clips() -> None:
    world = training()
    world.vote("a", clipped=[wire.StepReady.Clipped(node="b", pieces=1, worst=2.0)])
    assert world.last_to("a", "refusal").reason == wire.MALFORMED


@pytest.mark.parametrize("worst", [math.nan, 0.5, -1.0])
def test_a_vote_that_calls_small_gradients_too_large_is_refused(worst: float) -> None:
    world = strangers("a", "b")
    world.vote("a", clipped=[wire.StepReady.Clipped(node="b", pieces=1, worst=worst)])
    assert "clipped.worst" in world.last_to("a", "refusal").sentence


def test_a_vote_with_a_loss_below_zero_is_refused() -> None:
    world = training()
    world.vote("a")
    world.vote("b", loss_sum=-0.01)
    assert "loss_sum" in world.events(ev.NodeRefused)[-1].reason
    assert not world.events(ev.StepCommitted)


@pytest.mark.parametrize("loss", [1e300, 8e6 + 1, math.nan])
def test_a_loss_that_has_no_end_is_the_runs_fault_and_nobody_is_thrown_out(loss: float) -> None:
    """Two nodes with a stage each, and a learning rate that is too high."""
    world = training("a", "b", train={"learning_rate": 100.0})
    for attempt in range(ATTEMPTS):
        world.settle()
        world.vote("b", loss_sum=loss)
        if attempt + 1 < ATTEMPTS:
            world.wait(pause_leases(attempt + 1) * LEASE, beating="ab")  # b is tested
    assert not world.events(ev.NodeRefused)
    assert not world.events(ev.NodeQuarantined)
    assert world.exit_code == 1
    (failed,) = world.events(ev.RunFailed)
    assert "Lower train.learning_rate, which is 100, " in failed.reason


def test_of_three_replicas_the_one_that_alone_says_so_is_left_out() -> None:
    """Its device may be at fault, or it may lie."""
    world = training("a", "b", "c", "d", **LONG)
    world.vote("d", loss_sum=16e6)
    assert world.exit_code is None
    (left_out,) = world.events(ev.NodeOutOfUse)
    assert left_out.node == "d"
    assert "its loss is 2e+06 nats a token" in left_out.reason
    assert "d" not in world.plan_in_force.nodes
    assert not world.events(ev.NodeQuarantined)


@pytest.mark.parametrize(("loss_per", "complaint"), [("token", ""), ("sample", "its loss is 1.5e+06 nats a token")])
def test_few_samples_may_have_most_of_a_steps_tokens_and_so_of_its_loss(loss_per: str, complaint: str) -> None:
    """Where tokens count alike, a node's loss is its part of the whole step's, here of 8 samples, however few it has."""
    state = fresh_state(train={"loss_per": loss_per})
    found = votes._diverges(wire.StepReady(loss_sum=6e6, samples=4), state)
    assert found[: len(complaint)] == complaint
    assert bool(found) == bool(complaint)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_so_does_the_loss_of_one_micro_batch_where_work_is_audited(loss: float) -> None:
    world = strangers("a", "b", **LONG)
    world.vote("a", losses=[loss])
    assert [event.problem for event in world.events(ev.StepAborted)] == ["NON_FINITE"]
    assert not world.events(ev.NodeRefused)


def test_votes_of_another_step_or_generation_do_not_count() -> None:
    world = training()
    world.vote("a", step=2)
    world.vote("a", generation=7)
    world.vote("b")
    assert world.state.ledger.training.step == 0
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
    assert world.state.ledger.training.step == 0


def test_a_nan_step_is_tried_again_with_the_same_plan_until_two_have_said_so_twice() -> None:
    world = training("a", "b", "c")
    world.step()
    for attempt, node in enumerate("bcbc", 1):
        world.fail_step(node, wire.NON_FINITE)
        aborted = world.events(ev.StepAborted)[-1]
        assert (aborted.step, aborted.problem, aborted.node) == (2, "NON_FINITE", node)
        if attempt < 4:
            assert world.last_to("a", "assignment").generation == attempt + 1
            world.settle()
            assert world.last_to("a", "begin") == wire.Begin(generation=attempt + 1, step=2)
    assert world.exit_code == 1
    finish = world.last_to("a", "finish")
    assert not finish.completed
    assert "the last: scripted. Lower train.learning_rate" in finish.reason


def test_a_link_whose_stream_breaks_is_one_without_bandwidth_for_the_planner() -> None:
    world = training()
    world.automatic_planning = False
    world.fail_step("a", wire.PEER_LOST, peer="b")
    assert isinstance(world.state.phase, Gathering)
    assert world.wanted[-1].cluster().bandwidth.tolist() == [[0, 0], [0, 0]]
    assert world.exit_code is None


def test_losing_a_replica_aborts_the_step_and_the_others_go_on_with_their_state() -> None:
    world = training("a", "b", "c")
    world.step()
    world.vote("b")
    world.lose("a")
    aborted = world.events(ev.StepAborted)[-1]
    assert (aborted.step, aborted.problem, aborted.node) == (2, "NODE_LEFT", "a")
    assert world.last_to("b", "abort").step == 2
    assignment = world.last_to("b", "assignment")
    assert (assignment.generation, assignment.step, assignment.snapshot.folder) == (2, 1, "")
    assert world.donors_to("b") == [["b"], ["b"], ["c"], ["c"]]
    world.settle()
    assert world.last_to("c", "begin") == wire.Begin(generation=2, step=2)
    assert world.events(ev.RolledBack) == []


def test_votes_from_before_a_loss_do_not_count_after_it() -> None:
    world = training("a", "b", "c")
    world.vote("b")
    world.lose("a")
    world.settle()
    world.vote("c")
    world.vote("b", generation=1)
    assert world.state.ledger.training.step == 0
    world.vote("b")
    assert world.state.ledger.training.step == 1

"""What follows a commit: held-out loss, checkpoint, and after the last step the end of the run."""

from __future__ import annotations

import math
from dataclasses import replace

from dtfm.coordinator.core.ending import fail, finish
from dtfm.coordinator.core.replanning import adopt, again
from dtfm.coordinator.core.state import CheckpointTally, EvaluationTally, Pausing
from dtfm.coordinator.core.transition import Turn, WriteManifest
from dtfm.coordinator.core.validation import check_bucket, malformed, shorten
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.manifest import step_folder
from dtfm.protos import control_pb2 as wire

MAX_PENDING = 4
"""So many checkpoints may be under way; a slower store loses the oldest."""


def expect(turn: Turn, step: int, evaluate: bool, checkpoint: bool) -> None:
    """After the commit of ``step``: from now on its evaluation and checkpoint are awaited."""
    plan = turn.state.ledger.plan
    assert plan is not None
    if evaluate:
        tally = EvaluationTally(plan.generation, frozenset(route.nodes[-1] for route in plan.routes))
        turn.set(evaluations={**turn.state.evaluations, step: tally})
    if checkpoint:
        if len(turn.state.checkpoints) >= MAX_PENDING:
            oldest = min(turn.state.checkpoints)
            give_up(turn, oldest, f"it was not done when that of step {step} began; raise checkpoint.every")
        folder = step_folder(turn.state.run.checkpoint.uri, step)
        turn.set(checkpoints={**turn.state.checkpoints, step: CheckpointTally(folder, frozenset(plan.nodes))})


def evaluated(turn: Turn, node: str, report: wire.Evaluated) -> None:
    tally = turn.state.evaluations.get(report.step)
    if tally is None or tally.generation != report.generation or node not in tally.expected:
        turn.log(f"ignored an evaluation of step {report.step} from {node}: none is awaited")
        return
    if report.samples > turn.state.run.train.evaluation_samples:
        raise malformed("samples", report.samples, "no more than were asked for")
    if not math.isfinite(report.loss_sum):
        evaluation_lost(turn, report.step, f"{node} says it is {report.loss_sum}")
        return
    tally = replace(tally, reports={**tally.reports, node: report})
    turn.set(evaluations={**turn.state.evaluations, report.step: tally})
    samples = sum(r.samples for r in tally.reports.values())
    if tally.reports.keys() != tally.expected or samples == 0:
        return
    described = turn.state.ledger.described
    assert described is not None
    loss = math.fsum(r.loss_sum for r in tally.reports.values()) / samples
    turn.emit(ev.Evaluated(report.step, loss, samples, described.unigram_entropy))
    _forget_evaluation(turn, report.step)
    drained(turn)


def bucket_written(turn: Turn, node: str, written: wire.BucketWritten) -> None:
    described = turn.state.ledger.described
    assert described is not None
    check_bucket(written, described.buckets)
    tally = turn.state.checkpoints.get(written.step)
    if tally is None:
        turn.log(f"ignored bucket {written.bucket} of step {written.step} from {node}: no such checkpoint is awaited")
        return
    if written.problem:
        give_up(turn, written.step, f"{node} could not write bucket {written.bucket}: {shorten(written.problem)}")
        return
    tally = replace(tally, buckets={**tally.buckets, written.bucket: written})
    turn.set(checkpoints={**turn.state.checkpoints, written.step: tally})
    if len(tally.buckets) == described.buckets:
        turn.commands.append(WriteManifest(written.step, tally))


def manifest_done(turn: Turn, step: int, problem: str) -> None:
    tally = turn.state.checkpoints.get(step)
    if tally is None:
        return
    if problem:
        give_up(turn, step, problem)
        return
    _forget_checkpoint(turn, step)
    turn.emit(ev.CheckpointWritten(step, tally.folder))
    drained(turn)


def applied(turn: Turn, node: str, message: wire.Applied) -> None:
    """After a commit with pause: the replicas of each stage must hold the same bits."""
    phase, plan = turn.state.phase, turn.state.ledger.plan
    if not isinstance(phase, Pausing) or plan is None or node not in plan.nodes:
        return
    if (message.generation, message.step) != (plan.generation, turn.state.ledger.step):
        return
    turn.set(phase=replace(phase, applied={**phase.applied, node: message.state_digest}))
    drained(turn)


def evaluation_lost(turn: Turn, step: int, why: str) -> None:
    """The run goes on without this held-out loss."""
    turn.log(f"no held-out loss after step {step}: {why}")
    _forget_evaluation(turn, step)
    drained(turn)


def abandon(turn: Turn, node: str) -> frozenset[int]:
    """``node`` has left: what it had still to evaluate or to write will not come. Returns the steps whose checkpoints
    came to nothing."""
    lost = set()
    for step, evaluation in list(turn.state.evaluations.items()):
        if node in evaluation.expected - evaluation.reports.keys():
            turn.log(f"no held-out loss after step {step}: {node} left before its share was evaluated")
            _forget_evaluation(turn, step)
    for step, checkpoint in list(turn.state.checkpoints.items()):
        if node in checkpoint.writers and not _all_buckets(turn.state.ledger, checkpoint):
            _forget_checkpoint(turn, step)
            turn.emit(ev.CheckpointFailed(step, f"{node} left before every part was written"))
            lost.add(step)
    return frozenset(lost)


def give_up(turn: Turn, step: int, reason: str) -> None:
    """The checkpoint of ``step`` comes to nothing. Training goes on, unless it was the last one: then nothing would be
    left of the run, and it fails."""
    _forget_checkpoint(turn, step)
    turn.emit(ev.CheckpointFailed(step, reason))
    if step == turn.state.run.train.steps:
        fail(turn, f"all steps are trained, but the last checkpoint could not be written: {reason}")


def drained(turn: Turn) -> None:
    """Once all that follows the last commit is there: the run ends, or goes on with the plan that was chosen."""
    phase, ledger = turn.state.phase, turn.state.ledger
    if not isinstance(phase, Pausing) or turn.state.stopped or missing(turn):
        return
    assert ledger.plan is not None
    for index, stage in enumerate(ledger.plan.stages):
        digests = {node: phase.applied[node].hex() for node in stage.replicas if node in phase.applied}
        if len(set(digests.values())) > 1:
            turn.emit(ev.DigestMismatch(ledger.step, ledger.generation, index, digests))
            fail(
                turn,
                f"after step {ledger.step} the replicas of stage {index} hold different state; this is a bug in dtfm",
            )
            return
    if ledger.step < turn.state.run.train.steps:
        if turn.state.chosen is not None:
            adopt(turn, turn.state.chosen, "")
        elif not turn.state.saving:  # else who wants to go does so now, see departure.py
            again(turn, "a node of the plan that was chosen has left")
        return
    finish(turn, f"all {ledger.step} steps are trained; the checkpoint is {ledger.checkpoints[ledger.step]}")


def overdue(turn: Turn) -> None:
    """What follows a commit with pause took longer than patience lasts."""
    phase, step = turn.state.phase, turn.state.ledger.step
    assert isinstance(phase, Pausing)
    fail(turn, f"step {step} is trained, but {missing(turn)} did not come within {turn.state.patience:g} seconds")


def missing(turn: Turn) -> str:
    """What the pause still waits for; empty: nothing."""
    phase, ledger = turn.state.phase, turn.state.ledger
    assert isinstance(phase, Pausing)
    assert ledger.plan is not None
    silent = sorted((set(ledger.plan.nodes) & turn.state.sessions.keys()) - phase.applied.keys())
    if ledger.step == turn.state.run.train.steps and ledger.step not in ledger.checkpoints:
        return "the last checkpoint"
    if turn.state.saving and ledger.step in turn.state.checkpoints:
        return "the checkpoint"
    if ledger.step in turn.state.evaluations:
        return "the held-out loss"
    return f"the word of {', '.join(silent)}" if silent else ""


def _all_buckets(ledger: Ledger, tally: CheckpointTally) -> bool:
    assert ledger.described is not None
    return len(tally.buckets) == ledger.described.buckets


def _forget_evaluation(turn: Turn, step: int) -> None:
    turn.set(evaluations={s: tally for s, tally in turn.state.evaluations.items() if s != step})


def _forget_checkpoint(turn: Turn, step: int) -> None:
    turn.set(checkpoints={s: tally for s, tally in turn.state.checkpoints.items() if s != step})

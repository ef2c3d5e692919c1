"""Checkpoints: snapshots at the run's shared URL. One node writes each bucket, and the manifest makes a checkpoint whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from dtfm.coordinator.core.charging import quarantine
from dtfm.coordinator.core.ending import fail, fail_or_suspend
from dtfm.coordinator.core.state import ATTEMPTS, Destination, Layers, SnapshotTally, State
from dtfm.coordinator.core.transition import ManifestDone, TidyCheckpoints, Transition, WriteManifest
from dtfm.coordinator.core.trust.standing import is_alone, weakest
from dtfm.coordinator.core.trust.verdict import Against, OfTheRun, against_one, blame, named_twice
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.protos.checkpoint_names import step_folder

MOST_CHECKPOINTS = 4
"""The number of checkpoints under way. If another one begins, the oldest is given up."""


def begin(transition: Transition, step: int, writers: Mapping[str, Layers]) -> None:
    """The checkpoint of this step is under way. ``writers``: see SnapshotTally."""
    state = transition.state
    pending = [s for s in state.safekeeping.snapshots if s.destination is Destination.CHECKPOINT]
    if len(pending) >= MOST_CHECKPOINTS:
        reason = f"it was not done when that of step {step} began; raise checkpoint.every"
        give_up(transition, min(pending, key=lambda s: s.step), reason)
    due = transition.now + state.patience
    tally = SnapshotTally(step, Destination.CHECKPOINT, transition.now, writers, due, heard=transition.now)
    tally = replace(tally, due_from=_writers(state))
    safekeeping = transition.state.safekeeping.with_snapshot(tally)
    transition.set_safekeeping(replace(safekeeping, unfinished=safekeeping.unfinished | {step}))


def own_parts(
    transition: Transition, tally: SnapshotTally, node: str, told: Mapping[int, ev.SnapshotPart]
) -> dict[int, ev.SnapshotPart]:
    """Of what the node ``told``, by bucket, the parts of a checkpoint that it is to write: who answers first for those of others
    would write the checkpoint alone, and others would answer for its files."""
    own = {bucket: part for bucket, part in told.items() if node in tally.due_from[bucket]}
    if len(own) < len(told):
        transition.log(
            f"ignored {len(told) - len(own)} parts of step {tally.step} from {node}: others are to write them"
        )
    return own


def go_on(transition: Transition, tally: SnapshotTally, node: str, problem: str) -> None:
    """Once all buckets are written, by whichever nodes, the manifest makes the checkpoint whole."""
    described = transition.state.ledger.described
    assert described is not None
    if len(tally.parts) == described.buckets:
        transition.set_safekeeping(transition.state.safekeeping.with_snapshot(replace(tally, writers={})))
        folder = step_folder(transition.state.run.checkpoint.uri, tally.step)
        parts = tuple(tally.parts[bucket] for bucket in sorted(tally.parts))
        transition.commands.append(WriteManifest(tally.step, folder, parts))
    elif problem:
        give_up(transition, tally, f"{node} could not write its part: {problem}", (node,))
    elif not tally.writers:
        missing = min(set(range(described.buckets)) - tally.parts.keys())
        problem = f"bucket {missing} was written by no node"
        give_up(transition, tally, problem, tally.due_from[missing])


def manifest_done(transition: Transition, done: ManifestDone) -> None:
    step, problem, bucket = done.step, done.problem, done.bucket
    tally = transition.state.safekeeping.snapshot(Destination.CHECKPOINT, step)
    if tally is None:
        return
    if problem:
        suspects = [who for number, who in tally.told_by.items() if number == bucket]
        give_up(transition, tally, problem, suspects, undecided=True)  # others may have removed the file
        return
    safekeeping = transition.state.safekeeping.without_snapshot(tally)
    unfinished = safekeeping.unfinished - {step}
    transition.set_safekeeping(replace(safekeeping, unfinished=unfinished))
    target = transition.state.run.checkpoint
    transition.emit(ev.CheckpointWritten(step, step_folder(target.uri, step), done.digest))
    if tally.disputed:
        return  # this one may be of no use, so the older ones stay
    others = transition.state.safekeeping.snapshots
    under_way = frozenset(other.step for other in others if other.destination is Destination.CHECKPOINT)
    ledger = transition.state.ledger
    transition.commands.append(
        TidyCheckpoints(
            target.uri, ledger.run_id, ledger.copies.checkpoint_step, target.keep, under_way, unfinished - under_way
        )
    )


def give_up(
    transition: Transition, tally: SnapshotTally, reason: str, suspects: Collection[str] = (), undecided: bool = False
) -> None:
    """Abandons the checkpoint; the previous one stays. Training goes on, without one of the ``suspects``, if checkpoints failed
    because of it again and again; ``undecided``: it may not be at fault. Without the last checkpoint nothing would remain of the
    run: it is written again (stepping/post_commit.py), unless nobody or everybody is to blame; then the run fails."""
    transition.set_safekeeping(transition.state.safekeeping.without_snapshot(tally))
    ledger = transition.state.ledger
    accused = weakest(ledger, suspects) if suspects else ""
    transition.emit(ev.CheckpointFailed(tally.step, reason, accused))
    failures = transition.state.ledger.trust.checkpoint_failures
    is_owner = is_alone(ledger) and not ledger.is_open
    verdict = OfTheRun() if is_owner or not accused else blame(ledger, failures)
    match verdict:
        case OfTheRun() if tally.step == transition.state.run.train.steps:
            why = f"all steps are trained, but the last checkpoint could not be written: {reason}"
            if is_owner or not accused:
                fail(transition, why)
            else:
                fail_or_suspend(transition, named_twice(ledger, failures) or (accused,), Charge.SNAPSHOT, why)
        case Against():
            why = f"{ATTEMPTS} checkpoints failed because of it; the last: {reason}"
            verdict = against_one(ledger, suspects)
            quarantine(transition, replace(verdict, undecided=verdict.undecided or undecided), Charge.SNAPSHOT, why)


def _writers(state: State) -> Mapping[int, frozenset[str]]:
    """By bucket, who writes it into a checkpoint (Group.checkpoint_writer of the nodes). Which stages use one that several layers
    share is not known here: it may be one of each."""
    plan, described = state.ledger.training.plan, state.ledger.described
    assert plan is not None
    assert described is not None
    layers = len(described.workload.layers)
    return {
        bucket: frozenset(
            stage.replicas[bucket % len(stage.replicas)]
            for stage in plan.stages
            if bucket >= layers or bucket in range(*stage.layers)
        )
        for bucket in range(described.buckets)
    }

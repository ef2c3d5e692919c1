"""Checkpoints: snapshots at the run's shared URL. One node writes each bucket, and the manifest makes a checkpoint whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from dtfm.coordinator.core.state import Destination, Layers, SnapshotTally, State
from dtfm.coordinator.core.transition import ManifestDone, TidyCheckpoints, Transition, WriteManifest
from dtfm.coordinator.log import events as ev
from dtfm.protos.checkpoint_names import MANIFEST, bucket_of, step_folder

MOST_CHECKPOINTS = 4
"""The number of checkpoints under way. If another one begins, the oldest is given up."""


MOST_MODEL_FILE_BYTES = 64 << 20
"""A tokenizer's are the largest."""

MOST_STATE_TIMES = 8
"""The largest file of a bucket, in multiples of the bytes of all parameters: these may be in bf16, and the file is in fp32, with
two moments."""

RETRY_LEASES = 2
"""The time after which the last checkpoint is tried again."""


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


def most_bytes(state: State, node: str, step: int, file: str) -> int:
    """How large the node may make this file of the checkpoint of ``step``, where the coordinator keeps checkpoints itself; 0: it
    may not write it."""
    tally, described = state.safekeeping.snapshot(Destination.CHECKPOINT, step), state.ledger.described
    if tally is None or described is None:
        return 0
    bucket = bucket_of(file)
    if node not in tally.due_from.get(bucket or 0, ()):
        return 0
    if bucket is None:  # of the model: whoever writes the first bucket writes it
        return MOST_MODEL_FILE_BYTES if file != MANIFEST and "bucket" not in file else 0
    return int(MOST_STATE_TIMES * sum(layer.parameter_bytes for layer in described.workload.layers)) + (16 << 20)


def arrived(transition: Transition, step: int) -> None:
    """Part of a checkpoint has just come to the coordinator's disk: there is reason to wait for the rest."""
    if (tally := transition.state.safekeeping.snapshot(Destination.CHECKPOINT, step)) is not None:
        later = replace(tally, due=transition.now + transition.state.patience)
        transition.set_safekeeping(transition.state.safekeeping.with_snapshot(later))


def go_on(transition: Transition, tally: SnapshotTally, node: str, problem: str) -> None:
    """Once all buckets are written, by whichever nodes, the manifest makes the checkpoint whole."""
    described = transition.state.ledger.described
    assert described is not None
    if len(tally.parts) == described.buckets:
        transition.set_safekeeping(transition.state.safekeeping.with_snapshot(replace(tally, writers={})))
        folder = step_folder(transition.state.run.checkpoints, tally.step)
        parts = tuple(tally.parts[bucket] for bucket in sorted(tally.parts))
        transition.commands.append(WriteManifest(tally.step, folder, parts))
    elif problem:
        give_up(transition, tally, f"{node} could not write its part: {problem}", {node})
    elif not tally.writers:
        missing = min(set(range(described.buckets)) - tally.parts.keys())
        give_up(transition, tally, f"bucket {missing} was written by no node", tally.due_from[missing])


def manifest_done(transition: Transition, done: ManifestDone) -> None:
    """The checkpoint is whole, or its manifest could not be written."""
    tally = transition.state.safekeeping.snapshot(Destination.CHECKPOINT, done.step)
    if tally is None:
        return
    if done.problem:
        give_up(transition, tally, done.problem, () if done.bucket is None else tally.due_from[done.bucket])
        return
    safekeeping = transition.state.safekeeping.without_snapshot(tally)
    transition.set_safekeeping(replace(safekeeping, unfinished=safekeeping.unfinished - {done.step}))
    folder = step_folder(transition.state.run.checkpoints, done.step)
    transition.emit(ev.CheckpointWritten(done.step, folder, done.digest))
    if not tally.disputed:  # otherwise this one may be of no use, so the older ones stay
        tidy(transition)


def tidy(transition: Transition, undone: Collection[int] = ()) -> None:
    """Deletes the checkpoints that the run does not keep, what there is of those that were given up, and those of ``undone``
    steps: whoever looks into the folder alone would take them for the newest."""
    ledger, safekeeping, run = transition.state.ledger, transition.state.safekeeping, transition.state.run
    under_way = frozenset(each.step for each in safekeeping.snapshots if each.destination is Destination.CHECKPOINT)
    given_up = frozenset({*safekeeping.unfinished, *undone}) - under_way
    newest = ledger.copies.checkpoint_step
    if not newest and not undone:
        return
    transition.set_safekeeping(replace(safekeeping, unfinished=under_way))
    transition.commands.append(
        TidyCheckpoints(run.checkpoints, ledger.run_id, newest, run.checkpoint.keep, under_way, given_up)
    )


def give_up(transition: Transition, tally: SnapshotTally, reason: str, by: Collection[str] = ()) -> None:
    """Abandons the checkpoint; the previous one stays, and training goes on. Nobody is accused, as the storage may be at fault,
    but those ``by`` whom it failed leave the next one to their replicas. The last one is tried again after a while
    (step/pause.py): nothing else would remain of the run."""
    kept = transition.state.safekeeping.without_snapshot(tally)
    members = transition.state.ledger.members.keys()
    due = transition.now + RETRY_LEASES * transition.state.lease
    not_writing = (kept.not_writing | {*by}) & members
    transition.set_safekeeping(replace(kept, next_checkpoint=due, not_writing=not_writing))
    transition.emit(ev.CheckpointFailed(tally.step, reason))


def _writers(state: State) -> Mapping[int, frozenset[str]]:
    """By bucket, who writes it into a checkpoint (Group.checkpoint_writer of the nodes). Which stages use one that several layers
    share is not known here: it may be one of each."""
    plan, described, not_writing = (
        state.ledger.training.plan,
        state.ledger.described,
        state.safekeeping.not_writing,
    )
    assert plan is not None
    assert described is not None
    layers = len(described.workload.layers)
    able = {
        stage.layers: tuple(r for r in stage.replicas if r not in not_writing) or stage.replicas
        for stage in plan.stages
    }
    return {
        bucket: frozenset(
            replicas[bucket % len(replicas)]
            for (first, end), replicas in able.items()
            if bucket >= layers or first <= bucket < end
        )
        for bucket in range(described.buckets)
    }

"""Snapshots: the run's state after a step, written to a destination: a checkpoint (checkpoints.py), or nodes' disks
(disk_snapshots.py). What is done with either stands here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dtfm.coordinator.core.copies import checkpoints, disk_snapshots
from dtfm.coordinator.core.copies.availability import on_disk
from dtfm.coordinator.core.copies.donors import donors_at_work
from dtfm.coordinator.core.copies.files import same_file
from dtfm.coordinator.core.messages import part_message
from dtfm.coordinator.core.refusal import shorten
from dtfm.coordinator.core.state import Destination, Session, SnapshotTally, State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation.files import check_own_layers, check_parts
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import control_pb2 as wire
from dtfm.protos.checkpoint_names import step_folder
from dtfm.protos.places import COORDINATORS_DISK


def begin(transition: Transition, step: int, checkpoint: bool) -> wire.SnapshotDestination:
    """What the plan's nodes write after the commit of ``step``, which is then under way. ``checkpoint``: one is due."""
    plan = transition.state.ledger.training.plan
    assert plan is not None
    writers = {node: stage.layers for stage in plan.stages for node in stage.replicas}
    if checkpoint:
        disk_snapshots.put_off(transition)
        checkpoints.begin(transition, step, writers)
        return wire.CHECKPOINT
    return wire.DISKS if disk_snapshots.began(transition, step, writers) else wire.NO_SNAPSHOT


def reported(transition: Transition, session: Session, message: wire.SnapshotParts) -> None:
    """The node has written or fetched its parts of a snapshot under way, or could not."""
    described, node = transition.state.ledger.described, session.node
    assert described is not None
    check_parts(message, described.buckets)
    known = message.destination in (wire.CHECKPOINT, wire.DISKS)
    tally = transition.state.safekeeping.snapshot(Destination(message.destination), message.step) if known else None
    if tally is None or node not in tally.writers.keys() | tally.fetching.keys():
        if not message.parts and not message.problem:
            return  # it had nothing to write, and the others were done before
        transition.log(f"ignored the parts of a snapshot of step {message.step} from {node}: none is awaited")
        return
    if node in tally.writers:
        check_own_layers(message, tally.writers[node], len(described.workload.layers))
    told = {part.bucket: ev.SnapshotPart(part.size_bytes, part.digest.hex(), part.nonce) for part in message.parts}
    if tally.destination is Destination.CHECKPOINT:
        told = checkpoints.own_parts(transition, tally, node, told)
    if node in tally.writers and tally.destination is Destination.DISKS:
        written = {bucket: {**tally.written.get(bucket, {}), node: part} for bucket, part in told.items()}
        tally = replace(tally, written={**tally.written, **written})
    parts = {**told, **tally.parts} if node in tally.writers else tally.parts
    mine = frozenset(bucket for bucket, part in told.items() if same_file(part, parts.get(bucket)))
    if len(mine) < len(told):
        transition.log(
            f"{node} has different files for {len(told) - len(mine)} buckets of step {message.step} than the other nodes"
        )
    if message.problem:
        transition.log(f"{node} lacks part of the snapshot of step {message.step}: {shorten(message.problem)}")
    unable = bool(message.problem) or not tally.fetching.get(node, frozenset()) <= mine
    tally = replace(
        _without(tally, node),
        heard=transition.now,
        parts=parts,
        unable=tally.unable | {node} if unable else tally.unable,
        disputed=tally.disputed or len(mine) < len(told),
    )
    transition.set_safekeeping(transition.state.safekeeping.with_snapshot(tally))
    if tally.destination is Destination.CHECKPOINT:
        checkpoints.go_on(transition, tally, node, shorten(message.problem))
        return
    all_mine = session.on_disk.get(tally.step, frozenset()) | mine
    transition.set_session(replace(session, on_disk={**session.on_disk, tally.step: all_mine}))
    disk_snapshots.go_on(transition, tally)


def node_left(transition: Transition, node: str) -> None:
    """What the node was to write or to fetch is not awaited any more, even if it returns."""
    for tally in transition.state.safekeeping.snapshots:
        if tally.destination is Destination.DISKS:
            tally = _without(tally, node)
            transition.set_safekeeping(transition.state.safekeeping.with_snapshot(tally))
            disk_snapshots.go_on(transition, tally)
        elif node in tally.writers:
            checkpoints.give_up(transition, tally, f"{node} left before its part was written")


def end_overdue(transition: Transition) -> None:
    """Ends waiting for nodes that have not done their part of a snapshot in time, and for those that fetch from nodes whose
    links are needed for the state itself. On disks, buckets on one machine stay there alone."""
    if transition.state.stopped:
        return
    for tally in transition.state.safekeeping.snapshots:
        late = ", ".join(sorted(tally.writers.keys() | tally.fetching.keys()))
        if tally.destination is Destination.CHECKPOINT:
            if tally.writers and transition.now > tally.due:
                problem = f"{late} did not write its part within {transition.state.patience:g} seconds"
                checkpoints.give_up(transition, tally, problem, tally.writers)
        elif transition.now > tally.due:
            transition.log(f"the snapshot of step {tally.step} does not wait any longer for {late}")
            if tally.writers:
                disk_snapshots.go_on(transition, replace(tally, writers={}))
            else:
                disk_snapshots.end_with_what_there_is(transition, tally)
        elif not tally.writers and tally.fetching and donors_at_work(transition.state):
            disk_snapshots.end_with_what_there_is(transition, tally)


def rolled_back(transition: Transition, before: Collection[int]) -> None:
    """Training has gone back: snapshots of later steps no longer belong to its history. ``before``: the steps of the checkpoints
    that it had."""
    step = transition.state.ledger.training.step
    for tally in transition.state.safekeeping.snapshots:
        if tally.step <= step:
            continue
        if tally.destination is Destination.DISKS:
            disk_snapshots.give_up(transition, tally, f"training goes back to step {step}")
        else:
            transition.set_safekeeping(transition.state.safekeeping.without_snapshot(tally))
    checkpoints.tidy(transition, undone={each for each in before if each > step})
    if transition.state.safekeeping.snapshot(Destination.DISKS) is None:
        disk_snapshots.tidy(transition)


def source(state: State) -> wire.SnapshotSource:
    """The whole snapshot of the last committed step, for nodes that read it."""
    ledger = state.ledger
    if (whole := ledger.copies.on_disks) is not None and whole.step == ledger.training.step:
        holders = on_disk(state, whole.step, range(len(whole.parts)))
        if len(holders) == len(whole.parts):
            parts = [part_message(b, whole.parts[b], nodes) for b, nodes in holders.items()]
            return wire.SnapshotSource(parts=parts, states=_states(ledger))
    if (checkpoint := ledger.copies.checkpoints.get(ledger.training.step)) is None:
        return wire.SnapshotSource()
    itself = state.run.keeps_checkpoints_itself
    folder = step_folder(COORDINATORS_DISK, ledger.training.step) if itself else checkpoint.folder
    return wire.SnapshotSource(folder=folder, manifest=bytes.fromhex(checkpoint.manifest), states=_states(ledger))


def _without(tally: SnapshotTally, node: str) -> SnapshotTally:
    """``node`` is not awaited any more."""
    writers = {name: layers for name, layers in tally.writers.items() if name != node}
    fetching = {name: buckets for name, buckets in tally.fetching.items() if name != node}
    return replace(tally, writers=writers, fetching=fetching)


def _states(ledger: Ledger) -> list[wire.BucketState]:
    """What is known of the state after the last committed step."""
    agreed = enumerate(ledger.copies.agreed.get(ledger.training.step, ()))
    return [wire.BucketState(bucket=bucket, digest=bytes.fromhex(digest)) for bucket, digest in agreed if digest]

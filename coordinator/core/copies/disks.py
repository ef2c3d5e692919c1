"""What is on the nodes' own disks, and what they are to keep there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dtfm.coordinator.core.state import Admission, Session, State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation.files import check_parts
from dtfm.protos import control_pb2 as wire


def to_keep(state: State) -> wire.KeepSnapshots:
    """The snapshots that every node should keep: the whole ones, the one under way, and the one that goes to a checkpoint."""
    under_way = [each.step for each in (state.safekeeping.snapshot, state.safekeeping.upload) if each is not None]
    return wire.KeepSnapshots(steps=sorted({*state.ledger.copies.on_disks, *under_way}))


def tidy(transition: Transition) -> None:
    """Disks keep no more than they should."""
    keep = to_keep(transition.state)
    sessions = transition.state.members.sessions
    for session in [s for s in sessions.values() if s.on_disk.keys() - keep.steps]:
        kept = {step: buckets for step, buckets in session.on_disk.items() if step in keep.steps}
        transition.set_session(replace(session, on_disk=kept))
    joined = [s.node for s in sessions.values() if s.admission is not Admission.JOINED]
    transition.send(joined, wire.CoordinatorMessage(keep_snapshots=keep))


def claimed(transition: Transition, session: Session, claims: Collection[wire.SnapshotParts]) -> None:
    """A node that has just joined says what is on its disk. It gives no digests: only buckets that it had when the snapshot
    became whole count. Of a step that was trained again since then, it may have other files."""
    described, whole = transition.state.ledger.described, transition.state.ledger.copies.on_disks
    assert described is not None
    for claim in claims:
        check_parts(claim, described.buckets, digest_bytes=0)
    counting = {
        claim.step: whole[claim.step].buckets_of(session.node).intersection(part.bucket for part in claim.parts)
        for claim in claims
        if claim.step in whole
    }
    transition.set_session(replace(session, on_disk=counting))
    if claims:
        transition.send([session.node], wire.CoordinatorMessage(keep_snapshots=to_keep(transition.state)))

"""The files of a snapshot on disks, as several nodes wrote them. Replicas of the same state write the same file."""

from __future__ import annotations

import operator
from dataclasses import replace

from dtfm.coordinator.core.charging import quarantine
from dtfm.coordinator.core.state import SnapshotTally
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.verdict import Against, settle
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.events import SnapshotPart


def same_file(part: SnapshotPart, other: SnapshotPart | None) -> bool:
    """Whether they have the same content, whatever their names."""
    return other is not None and (part.size_bytes, part.digest) == (other.size_bytes, other.digest)


def settle_files(transition: Transition, tally: SnapshotTally) -> SnapshotTally:
    """All have written. Of a bucket of which they wrote different files the one of most parties counts (see `settle`); the others
    are on no disk, and who wrote them goes."""
    parts, verdicts = dict(tally.parts), dict[int, Against]()
    for bucket, files in sorted(tally.written.items()):
        verdict = settle(transition.state.ledger, files, operator.eq)
        if verdict is None:
            continue
        verdicts[bucket] = verdict
        right = files[verdict.others[0]] if verdict.others else None
        if right is not None:
            parts[bucket] = right
        for node, file in files.items():
            _count(transition, node, tally.step, bucket, here=file == right)
    tally = replace(tally, parts=parts, written={})
    transition.set_safekeeping(transition.state.safekeeping.with_snapshot(tally))
    for bucket, verdict in verdicts.items():
        reason = f"into the snapshot of step {tally.step} it wrote another file of bucket {bucket} than other replicas"
        quarantine(transition, verdict, Charge.SNAPSHOT, reason)
    return tally


def _count(transition: Transition, node: str, step: int, bucket: int, *, here: bool) -> None:
    """Whether the bucket's file is on the node's disk, if the node is here."""
    if (session := transition.state.members.sessions.get(node)) is not None:
        others = session.on_disk.get(step, frozenset()) - {bucket}
        on_disk = {**session.on_disk, step: others | {bucket} if here else others}
        transition.set_session(replace(session, on_disk=on_disk))

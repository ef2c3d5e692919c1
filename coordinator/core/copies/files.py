"""The files of a snapshot, as several nodes wrote them. Replicas of the same state write the same file."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.findings import Doubt, Doubted, contradicting
from dtfm.coordinator.core.state import SnapshotTally
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.agreement import dissent
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.events import SnapshotPart


def same_file(part: SnapshotPart, other: SnapshotPart | None) -> bool:
    """Whether they have the same content, whatever their names."""
    return other is not None and (part.size_bytes, part.digest) == (other.size_bytes, other.digest)


def settle_files(transition: Transition, tally: SnapshotTally) -> SnapshotTally:
    """All have written. Of a bucket of which they wrote different files that of most parties counts, if it is more than half of
    them. The others are on no disk."""
    parts, party, doubts = dict(tally.parts), transition.state.ledger.party, list[Doubt]()
    for bucket, files in sorted(tally.written.items()):
        pairs = dissent(transition.state.ledger, files)
        if not pairs:
            continue
        reason = f"their files of bucket {bucket} in the snapshot of step {tally.step} differ"
        doubts += contradicting(Charge.SNAPSHOT, pairs, reason)
        by_file = {file: {party(node) for node, its in files.items() if its == file} for file in files.values()}
        most = max(by_file, key=lambda file: len(by_file[file]))
        right = most if 2 * len(by_file[most]) > len(set(map(party, files))) else None
        if right is not None:
            parts[bucket] = right
        for node, file in files.items():
            _count(transition, node, tally.step, bucket, here=file == right)
    tally = replace(tally, parts=parts, written={})
    transition.set_safekeeping(replace(transition.state.safekeeping, snapshot=tally))
    if doubts:
        transition.find(Doubted(tuple(doubts)))
    return tally


def _count(transition: Transition, node: str, step: int, bucket: int, *, here: bool) -> None:
    """Whether the bucket's file is on the node's disk, if the node is here."""
    if (session := transition.state.members.sessions.get(node)) is not None:
        others = session.on_disk.get(step, frozenset()) - {bucket}
        on_disk = {**session.on_disk, step: others | {bucket} if here else others}
        transition.set_session(replace(session, on_disk=on_disk))

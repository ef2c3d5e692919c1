"""The files of a snapshot, as several nodes wrote them. Replicas of the same state write the same file."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.findings import Doubt, Doubted, contradicting
from dtfm.coordinator.core.state import SnapshotTally
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.agreement import dissent
from dtfm.coordinator.log.charges import Charge


def settle_files(transition: Transition, tally: SnapshotTally) -> SnapshotTally:
    """All have written. Of a bucket of which they wrote different files that of most parties counts, if it is more than half of
    them. The others are on no disk."""
    party, doubts = transition.state.ledger.party, list[Doubt]()
    parts, right = dict(tally.parts), dict[str, set[int]]()  # by node, the buckets of which its file counts
    for bucket, files in sorted(tally.written.items()):
        if pairs := dissent(transition.state.ledger, files):
            reason = f"their files of bucket {bucket} in the snapshot of step {tally.step} differ"
            doubts += contradicting(Charge.SNAPSHOT, pairs, reason)
        by_file = {file: {party(node) for node, its in files.items() if its == file} for file in files.values()}
        most = max(by_file, key=lambda file: len(by_file[file]), default=None)
        if most is not None and 2 * len(by_file[most]) > len(set(map(party, files))):
            parts[bucket] = most
            for node in (node for node, file in files.items() if file == most):
                right.setdefault(node, set()).add(bucket)
    for node, buckets in right.items():
        if (session := transition.state.members.sessions.get(node)) is not None:
            on_disk = {**session.on_disk, tally.step: session.on_disk.get(tally.step, frozenset()) | buckets}
            transition.set_session(replace(session, on_disk=on_disk))
    tally = replace(tally, parts=parts, written={})
    transition.set_safekeeping(replace(transition.state.safekeeping, snapshot=tally))
    if doubts:
        transition.find(Doubted(tuple(doubts)))
    return tally

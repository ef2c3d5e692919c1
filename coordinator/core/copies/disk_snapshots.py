"""Snapshots on disks, for stages that would otherwise be lost with one machine.

Each node writes all that it trains to its own disk, then others fetch what is on one machine alone. A snapshot is whole when each
part is on two machines, or cannot be; the one before can go then.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dtfm.coordinator.core.copies.availability import on_disk, parameter_bytes
from dtfm.coordinator.core.copies.donors import donors_at_work
from dtfm.coordinator.core.copies.files import settle_files
from dtfm.coordinator.core.copies.machines import machines, machines_of
from dtfm.coordinator.core.copies.standby import rests_on_one_machine
from dtfm.coordinator.core.messages import part_message, peer_message
from dtfm.coordinator.core.state import Admission, Destination, Layers, Session, SnapshotTally, State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation.files import check_parts
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire

PAUSE_LEASES = 6
"""The least time between two snapshots on disks."""

LOSS_LEASES = 360
"""How often a stage that rests on one machine is taken to be lost: once an hour, where the lease is ten seconds."""

TIME_FRACTION = 0.2
"""The largest fraction of the time that snapshots on disks may take, and of the links that carry them meanwhile."""

PATIENCE_FACTOR = 10
"""Nodes may take this many times as long as writing or fetching their part should take, and at least as many leases."""

DISK_BANDWIDTH = 100e6
"""Bytes per second that a node's disk should write."""

Holders = Mapping[int, Sequence[str]]
"""By bucket, the connected nodes that have it on disk."""


def began(transition: Transition, step: int, writers: Mapping[str, Layers]) -> bool:
    """Whether one is due, and under way now. ``writers``: see SnapshotTally."""
    state, due = transition.state, transition.state.safekeeping.next_on_disks
    if due is None:
        put_off(transition)
        return False
    if state.safekeeping.snapshot(Destination.DISKS) or transition.now < due or not rests_on_one_machine(state):
        return False
    longest = max(_state_bytes(state, layers) for layers in writers.values()) / DISK_BANDWIDTH
    tally = SnapshotTally(
        step, Destination.DISKS, transition.now, writers, due=_due(transition, longest), heard=transition.now
    )
    transition.set_safekeeping(transition.state.safekeeping.with_snapshot(tally))
    return True


def put_off(transition: Transition) -> None:
    """The next one is not due before PAUSE_LEASES are over."""
    due = transition.now + PAUSE_LEASES * transition.state.lease
    transition.set_safekeeping(replace(transition.state.safekeeping, next_on_disks=due))


def claimed(transition: Transition, session: Session, claims: Collection[wire.SnapshotParts]) -> None:
    """A node that has just joined says what is on its disk. It gives no digests: only buckets that it had when the snapshot
    became whole count. Of a step that was trained again since then, it may have other files."""
    described, whole = transition.state.ledger.described, transition.state.ledger.copies.on_disks
    assert described is not None
    for claim in claims:
        check_parts(claim, described.buckets, digest_bytes=0)
    mine = whole.buckets_of(session.node) if whole is not None else frozenset[int]()
    on_disk = {claim.step: mine.intersection(part.bucket for part in claim.parts) for claim in claims}
    counting = {step: buckets for step, buckets in on_disk.items() if whole is not None and step == whole.step}
    transition.set_session(replace(session, on_disk=counting))
    if claims:
        transition.send([session.node], wire.CoordinatorMessage(keep_snapshots=_to_keep(transition.state)))


def go_on(transition: Transition, tally: SnapshotTally) -> None:
    """Once all is written: what is on one machine alone is fetched by others; once that is there, the snapshot is whole."""
    if tally.writers:
        return
    tally = settle_files(transition, tally)
    state = transition.state
    if (holders := _all_on_disk(state, tally)) is None:
        give_up(transition, tally, "some of it is on no disk")
        return
    fetching, machine = dict(tally.fetching), machines(state.ledger)
    coming = frozenset().union(*fetching.values())
    single = {
        bucket: nodes[0]
        for bucket, nodes in holders.items()
        if len(machines_of(machine, nodes)) == 1 and bucket not in coming
    }
    fetchers = _fetchers(state, tally, single, machine)
    for node, (buckets, _) in fetchers.items():
        fetching[node] = fetching.get(node, frozenset()) | buckets
        to_keep = _to_fetch(state, tally, holders, fetching[node])
        transition.send([node], wire.CoordinatorMessage(keep_snapshots=to_keep))
    due = max([tally.due, *(_due(transition, seconds) for _, seconds in fetchers.values())])
    tally = replace(tally, fetching=fetching, due=due)
    transition.set_safekeeping(state.safekeeping.with_snapshot(tally))
    if not fetching:
        end_with_what_there_is(transition, tally)


def end_with_what_there_is(transition: Transition, tally: SnapshotTally) -> None:
    """The snapshot on disks is whole if every bucket is on the disk of a node that is here."""
    if (holders := _all_on_disk(transition.state, tally)) is None:
        give_up(transition, tally, "some of it is on no disk")
        return
    parts = tuple(tally.parts[bucket] for bucket in sorted(holders))
    by_node: dict[str, list[int]] = {}
    for bucket, nodes in holders.items():
        for node in nodes:
            by_node.setdefault(node, []).append(bucket)
    ranges = {node: _ranges(buckets) for node, buckets in sorted(by_node.items())}
    transition.emit(ev.SnapshotWritten(tally.step, parts, ranges, transition.now - tally.since))
    _end(transition, tally)


def give_up(transition: Transition, tally: SnapshotTally, reason: str) -> None:
    """Abandons the snapshot; the previous one stays."""
    transition.log(f"no snapshot of step {tally.step} on disks: {reason}")
    _end(transition, tally)


def tidy(transition: Transition) -> None:
    """With no snapshot under way, disks keep only the whole one."""
    to_keep = _to_keep(transition.state)
    sessions = transition.state.members.sessions
    for session in [s for s in sessions.values() if s.on_disk]:
        kept = {step: buckets for step, buckets in session.on_disk.items() if step == to_keep.whole}
        transition.set_session(replace(session, on_disk=kept))
    joined = [s.node for s in sessions.values() if s.admission is not Admission.JOINED]
    transition.send(joined, wire.CoordinatorMessage(keep_snapshots=to_keep))


def pause_after(seconds: float, lease: float) -> float:
    """Seconds between two snapshots on disks of which the last took ``seconds``: the square root of twice the cost times the mean
    time between losses (Young, "A first order approximation to the optimum checkpoint interval", 1974), but at most TIME_FRACTION
    of the time goes into them."""
    return max(PAUSE_LEASES * lease, math.sqrt(2 * seconds * LOSS_LEASES * lease), seconds / TIME_FRACTION)


def _end(transition: Transition, tally: SnapshotTally) -> None:
    """The pause before the next one is counted from the last report: waiting for a node in vain costs nothing."""
    cost = tally.heard - tally.since
    safekeeping = transition.state.safekeeping.without_snapshot(tally)
    transition.set_safekeeping(
        replace(safekeeping, next_on_disks=transition.now + pause_after(cost, transition.state.lease) - cost)
    )
    tidy(transition)


def _to_keep(state: State) -> wire.KeepSnapshots:
    """The snapshots that every node should keep."""
    whole, tally = state.ledger.copies.on_disks, state.safekeeping.snapshot(Destination.DISKS)
    return wire.KeepSnapshots(whole=whole.step if whole else 0, under_way=tally.step if tally else 0)


def _to_fetch(state: State, tally: SnapshotTally, holders: Holders, buckets: Collection[int]) -> wire.KeepSnapshots:
    to_keep = _to_keep(state)
    to_keep.missing.extend(part_message(bucket, tally.parts[bucket], holders[bucket]) for bucket in sorted(buckets))
    sessions = state.members.sessions
    names = sorted({name for part in to_keep.missing for name in part.nodes})
    to_keep.peers.extend(peer_message(name, sessions[name].candidates) for name in names)
    return to_keep


def _fetchers(
    state: State, tally: SnapshotTally, single: Mapping[int, str], machine: Mapping[str, str]
) -> Mapping[str, tuple[frozenset[int], float]]:
    """Who fetches which of the buckets that are on one machine alone (``single``: by bucket, a node there), and in how many
    seconds if nothing else fills the links. All of a node's buckets go to the one on another machine that will finish first,
    given its link and its other fetches. Nobody fetches from `donors_at_work`. ``machine``: see `machines`."""
    fetchers: dict[str, tuple[frozenset[int], float]] = {}
    load: dict[str, float] = {}
    staying = state.ledger.staying
    for holder in sorted(set(single.values()) - donors_at_work(state)):
        buckets = frozenset(bucket for bucket, node in single.items() if node == holder)
        size = sum(tally.parts[bucket].size_bytes for bucket in buckets)
        row = state.ledger.reach.links.get(holder, {})
        elsewhere = [n for n in staying if machine[n] != machine.get(holder, holder)]
        links = {n: row[n].bandwidth for n in elsewhere if n in row and n not in tally.unable}
        seconds = {node: (load.get(node, 0.0) + size) / bandwidth for node, bandwidth in links.items() if bandwidth}
        if seconds:
            node = min(seconds, key=lambda n: (seconds[n], n))
            others, before = fetchers.get(node, (frozenset[int](), 0.0))
            fetchers[node] = others | buckets, max(before, seconds[node])
            load[node] = load.get(node, 0.0) + size
    return fetchers


def _all_on_disk(state: State, tally: SnapshotTally) -> Holders | None:
    """None: some bucket is on no disk of a node that is here."""
    assert state.ledger.described is not None
    holders = on_disk(state, tally.step, tally.parts)
    return holders if len(holders) == len(tally.parts) == state.ledger.described.buckets else None


def _due(transition: Transition, seconds: float) -> float:
    """The deadline for a part that should take ``seconds``."""
    return transition.now + PATIENCE_FACTOR * max(seconds, transition.state.lease)


def _state_bytes(state: State, layers: Layers) -> float:
    assert state.ledger.described is not None
    return parameter_bytes(state, layers) * state.ledger.described.workload.bytes_moved_per_parameter_byte


def _ranges(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Rising ``numbers`` as ranges [first, past_last)."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return tuple(ranges)

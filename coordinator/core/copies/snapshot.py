"""Snapshots: the run's state after a step, on the nodes' own disks.

Each node writes the state that it trains to its own disk. If no snapshot was spread for a while, other nodes then fetch the
parts that are on only one machine. When each part is on two machines, or cannot be, the snapshot is spread, and earlier
snapshots can go. If a checkpoint is due, files go from the disks to the run's place for checkpoints (checkpoints.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dtfm.coordinator.core.copies import checkpoints, disks, moving
from dtfm.coordinator.core.copies.availability import donors_at_work, moved_bytes, on_disk
from dtfm.coordinator.core.copies.keeping_up import rests_on_one_machine
from dtfm.coordinator.core.findings import Doubt, contradicting
from dtfm.coordinator.core.messages import part_message
from dtfm.coordinator.core.refusal import shorten
from dtfm.coordinator.core.state.copies import Moves, SnapshotTally
from dtfm.coordinator.core.state.session import Session
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.agreement import dissent
from dtfm.coordinator.core.validation.files import check_own_layers, check_parts
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.debts import joined
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import control_pb2 as wire

PAUSE_LEASES = 6
"""The least time between two snapshots that are spread over machines."""

LOSS_LEASES = 360
"""How often a stage on only one machine is assumed to be lost: once an hour, where the lease is ten seconds."""

TIME_FRACTION = 0.2
"""The largest fraction of the time that snapshots may take. Also the largest fraction that they may take of links."""

PATIENCE_FACTOR = 10
"""Nodes may take this many times as long as writing or fetching their part should take, and at least this many leases."""

DISK_BANDWIDTH = 100e6
"""The bytes per second that a node's disk is expected to write."""

Holders = Mapping[int, Sequence[str]]
"""By bucket, the connected nodes that have the bucket on disk."""


def begin(transition: Transition, step: int, *, checkpoint: bool, last: bool) -> bool:
    """Whether the plan's nodes now write the state after ``step`` to their disks. If so, a snapshot is under way. ``checkpoint``:
    a checkpoint is due. ``last``: no step follows, so this snapshot replaces the one under way."""
    if transition.state.safekeeping.next_spread is None:
        _put_off(transition)
    kept = transition.state.safekeeping
    due = checkpoint or kept.checkpoint_due
    if last:
        reason = "it was not done when training came to an end"
        if kept.snapshot is not None:
            _give_up(transition, kept.snapshot, reason)
        checkpoints.give_up(transition, reason)
    waits = not last and (kept.snapshot is not None or (kept.upload is not None and not kept.upload.is_in_trouble))
    kept = replace(transition.state.safekeeping, checkpoint_due=due and waits)
    transition.set_safekeeping(kept)
    rests_on_disks = last and transition.state.run.checkpoint.weights
    spread = rests_on_disks or (kept.next_spread is not None and transition.now >= kept.next_spread)
    sends = due and not waits
    if kept.snapshot is not None or not (sends or (spread and rests_on_one_machine(transition.state))):
        return False
    plan, *_ = transition.state.ledger.training.in_force.islands  # all islands have the same weights now
    writers = {node: stage.layers for stage in plan.stages for node in stage.replicas}
    most_bytes = max(moved_bytes(transition.state, layers) for layers in writers.values())
    moves, until, sessions = Moves(), _due(transition, most_bytes / DISK_BANDWIDTH), transition.state.members.sessions
    for node in sorted(writers.keys() & sessions.keys()):
        moves = moving.begun(moves, sessions[node], range(*writers[node]), until)
    tally = SnapshotTally(step, transition.now, heard=transition.now, spread=spread, checkpoint=sends, moves=moves)
    transition.set_safekeeping(replace(kept, snapshot=tally))
    return True


def moved(transition: Transition, session: Session, message: wire.Moved) -> None:
    """The node has written or fetched its parts of the snapshot under way, or could not."""
    described, node, tally = transition.state.ledger.description, session.node, transition.state.safekeeping.snapshot
    check_parts(message, described.buckets)
    awaited = tally.moves.of(node) if tally is not None and tally.step == message.step else ()
    if tally is None or not awaited:
        transition.log(f"ignored the parts of a snapshot of step {message.step} from {node}: none is awaited")
        return
    told = {part.bucket: ev.SnapshotPart(part.size_bytes, part.digest.hex()) for part in message.parts}
    if tally.parts:
        brought = frozenset(bucket for bucket, part in told.items() if part == tally.parts.get(bucket))
        if brought:
            on_disk = {**session.on_disk, tally.step: session.on_disk.get(tally.step, frozenset()) | brought}
            transition.set_session(replace(session, on_disk=on_disk))
    else:
        check_own_layers(message, (min(awaited), max(awaited) + 1), len(described.workload.layers))
        brought = frozenset(told)
        written = {bucket: {**tally.written.get(bucket, {}), node: part} for bucket, part in told.items()}
        tally = replace(tally, written={**tally.written, **written})
    moves = moving.arrived(tally.moves, node, brought)
    if message.problem or not brought:
        moves = moving.failed(moves, node, f"{node}: {shorten(message.problem) or 'it brings nothing'}")
    _go_on(transition, _set(transition, replace(tally, heard=transition.now, moves=moves)))


def go_on(transition: Transition) -> None:
    """The rule: stops waiting for nodes that are late or have left, and for nodes that fetch over links that are needed for the
    state itself. Parts that nobody else can fetch then stay on one machine."""
    state, tally = transition.state, transition.state.safekeeping.snapshot
    if tally is None or state.stopped:
        return
    moves = moving.followed(tally.moves, state.members.sessions, transition.now)
    if tally.parts and moves.under_way and donors_at_work(state):
        _end_with_what_there_is(transition, tally)
    elif moves != tally.moves:
        _go_on(transition, _set(transition, replace(tally, moves=moves)))
    elif not tally.parts:
        _go_on(transition, tally)  # a node of the plan may have left before it was asked to write


def rolled_back(transition: Transition, before: Collection[int]) -> None:
    """Training has gone back: gives up snapshots and checkpoints of later steps. ``before``: the steps of the checkpoints before
    training went back; the later ones are in doubt. Others stay: weights that came home may be all that is left."""
    step = transition.state.ledger.training.step
    kept = transition.state.safekeeping
    if (tally := kept.snapshot) is not None and tally.step > step:
        _give_up(transition, tally, f"training goes back to step {step}")
    if kept.upload is not None and kept.upload.step > step:
        checkpoints.give_up(transition, f"training goes back to step {step}")
    checkpoints.tidy(transition, undone={each for each in before if each > step})
    disks.tidy(transition)


def source(state: State) -> wire.SnapshotSource:
    """The whole snapshot of the last committed step, or its checkpoint, for nodes that read it."""
    ledger = state.ledger
    if (whole := ledger.copies.on_disks.get(ledger.training.step)) is not None:
        holders = on_disk(state, whole.step, range(len(whole.parts)))
        if len(holders) == len(whole.parts):
            parts = [part_message(b, whole.parts[b], nodes) for b, nodes in holders.items()]
            return wire.SnapshotSource(parts=parts, states=_states(ledger))
    checkpoint = ledger.copies.checkpoints.get(ledger.training.step)
    if checkpoint is None or not ledger.copies.may_go_on_from(checkpoint):
        return wire.SnapshotSource()
    return wire.SnapshotSource(
        folder=state.run.as_nodes_reach(checkpoint.folder),
        manifest=bytes.fromhex(checkpoint.manifest),
        states=_states(ledger),
        weights=checkpoint.weights,
    )


def pause_after(seconds: float, lease: float) -> float:
    """Seconds between two snapshots, if the last took ``seconds``: the square root of twice the cost times the mean time between
    losses. Snapshots take at most TIME_FRACTION of the time. Source: Young, "A first order approximation to the optimum
    checkpoint interval", 1974."""
    return max(PAUSE_LEASES * lease, math.sqrt(2 * seconds * LOSS_LEASES * lease), seconds / TIME_FRACTION)


def _go_on(transition: Transition, tally: SnapshotTally) -> None:
    """When all parts are written, sends them to a checkpoint if that is due, and has nodes fetch the parts that are on one
    machine alone. When these are fetched, the snapshot is whole."""
    if not tally.parts:
        if tally.moves.under_way:
            if not _may_become_whole(transition.state, tally):
                _give_up(transition, tally, tally.moves.problem or "a node that was to write a part of it has left")
            return
        tally = _settle_files(transition, tally)
    if (holders := _all_on_disk(transition.state, tally)) is None:
        _give_up(transition, tally, tally.moves.problem or "some of it is on no disk")
        return
    if tally.checkpoint:
        tally = _set(transition, replace(tally, checkpoint=False))
        checkpoints.begin(transition, tally.step, tally.parts)
    state, moves = transition.state, tally.moves
    party, coming = state.ledger.party, moves.under_way
    single = {
        bucket: nodes[0]
        for bucket, nodes in holders.items()
        if len(set(map(party, nodes))) == 1 and bucket not in coming
    }
    if single and not tally.spread:
        _end_with_what_there_is(transition, tally, spread=False)
        return
    for node, (buckets, seconds) in _fetchers(state, tally, single).items():
        moves = moving.begun(moves, state.members.sessions[node], buckets, _due(transition, seconds))
        transition.send([node], wire.CoordinatorMessage(keep=disks.to_keep(state)))  # makes room
        transition.send([node], wire.CoordinatorMessage(move=_to_fetch(state, tally, holders, buckets)))
    tally = _set(transition, replace(tally, moves=moves))
    if not moves.under_way:
        _end_with_what_there_is(transition, tally)


def _settle_files(transition: Transition, tally: SnapshotTally) -> SnapshotTally:
    """Decides which file of each bucket counts, when all have written. Replicas of the same state write the same file. If their
    files differ, the file of most parties counts, if these are more than half. The other files count as on no disk."""
    party, doubts = transition.state.ledger.party, list[Doubt]()
    parts, right = dict(tally.parts), dict[str, set[int]]()  # by node, the buckets whose file from it counts
    for bucket, files in sorted(_written(tally).items()):
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
    tally = _set(transition, replace(tally, parts=parts, written={}))
    if doubts:
        transition.find(tuple(doubts))
    return tally


def _may_become_whole(state: State, tally: SnapshotTally) -> bool:
    """Whether every layer's bucket is written, or is being written."""
    return tally.moves.under_way.union(_written(tally)).issuperset(range(len(state.ledger.holders)))


def _written(tally: SnapshotTally) -> Mapping[int, Mapping[str, ev.SnapshotPart]]:
    """By bucket and node, the files of the nodes that have stayed."""
    stayed = tally.moves.by_node.keys()
    here = {bucket: {n: of[n] for n in of if n in stayed} for bucket, of in tally.written.items()}
    return {bucket: files for bucket, files in here.items() if files}


def _end_with_what_there_is(transition: Transition, tally: SnapshotTally, *, spread: bool = True) -> None:
    """The snapshot is whole if every bucket is on the disk of a connected node. ``spread``: see SnapshotWritten."""
    if (holders := _all_on_disk(transition.state, tally)) is None:
        _give_up(transition, tally, tally.moves.problem or "some of it is on no disk")
        return
    parts = tuple(tally.parts[bucket] for bucket in sorted(holders))
    by_node: dict[str, list[int]] = {}
    for bucket, nodes in holders.items():
        for node in nodes:
            by_node.setdefault(node, []).append(bucket)
    ranges = {node: joined([(b, b + 1) for b in buckets]) for node, buckets in sorted(by_node.items())}
    transition.emit(ev.SnapshotWritten(tally.step, parts, ranges, transition.now - tally.since, spread))
    if tally.spread:
        _put_off(transition, tally.heard - tally.since)
    _end(transition)


def _give_up(transition: Transition, tally: SnapshotTally, reason: str) -> None:
    """Abandons the snapshot, and its checkpoint if it has one; earlier ones stay. Nobody is accused: disks may be full."""
    if tally.checkpoint:
        checkpoints.failed(transition, tally.step, reason)
    transition.log(f"no snapshot of step {tally.step} on disks: {reason}")
    if tally.spread:
        _put_off(transition, tally.heard - tally.since)
    _end(transition)


def _end(transition: Transition) -> None:
    transition.set_safekeeping(replace(transition.state.safekeeping, snapshot=None))
    disks.tidy(transition)


def _put_off(transition: Transition, cost: float = 0.0) -> None:
    """Parts on one machine alone are not fetched again before a pause is over. The pause begins at the last report of a snapshot
    that took ``cost`` seconds: time spent waiting for a node in vain does not count."""
    pause = pause_after(cost, transition.state.lease) - cost
    transition.set_safekeeping(replace(transition.state.safekeeping, next_spread=transition.now + pause))


def _set(transition: Transition, tally: SnapshotTally) -> SnapshotTally:
    before = transition.state.safekeeping.snapshot
    if before is not None and tally.moves.failed - before.moves.failed:
        transition.log(f"part of the snapshot of step {tally.step} is missing: {tally.moves.problem}")
    transition.set_safekeeping(replace(transition.state.safekeeping, snapshot=tally))
    return tally


def _to_fetch(state: State, tally: SnapshotTally, holders: Holders, buckets: Collection[int]) -> wire.Move:
    members, names = state.ledger.members, sorted({name for bucket in buckets for name in holders[bucket]})
    return wire.Move(
        step=tally.step,
        parts=[part_message(bucket, tally.parts[bucket], holders[bucket]) for bucket in sorted(buckets)],
        peers=[wire.Peer(node=name, candidates=members[name].candidates) for name in names],
    )


def _fetchers(
    state: State, tally: SnapshotTally, single: Mapping[int, str]
) -> Mapping[str, tuple[frozenset[int], float]]:
    """By node, the buckets that it fetches from other machines, and the seconds that this takes if nothing else fills the links.
    ``single``: by bucket on one machine alone, a node there. All buckets of such a node go to one node on another machine: the
    one that will finish first, given its link and its other fetches. Nobody fetches from `donors_at_work`."""
    fetchers: dict[str, tuple[frozenset[int], float]] = {}
    load: dict[str, float] = {}
    staying, party = state.ledger.staying, state.ledger.party
    for holder in sorted(set(single.values()) - donors_at_work(state)):
        buckets = frozenset(bucket for bucket, node in single.items() if node == holder)
        size = sum(tally.parts[bucket].size_bytes for bucket in buckets)
        row = state.ledger.reach.links.get(holder, {})
        elsewhere = [n for n in staying if party(n) != party(holder)]
        links = {n: row[n].bandwidth for n in elsewhere if n in row and n not in tally.moves.failed}
        seconds = {node: (load.get(node, 0.0) + size) / bandwidth for node, bandwidth in links.items() if bandwidth}
        if seconds:
            node = min(seconds, key=lambda n: (seconds[n], n))
            others, before = fetchers.get(node, (frozenset[int](), 0.0))
            fetchers[node] = others | buckets, max(before, seconds[node])
            load[node] = load.get(node, 0.0) + size
    return fetchers


def _all_on_disk(state: State, tally: SnapshotTally) -> Holders | None:
    """By bucket, its holders; None: some bucket is on no disk of a connected node."""
    holders = on_disk(state, tally.step, tally.parts)
    return holders if len(holders) == len(tally.parts) == state.ledger.description.buckets else None


def _due(transition: Transition, seconds: float) -> float:
    """The deadline for a part that should take ``seconds``."""
    return transition.now + PATIENCE_FACTOR * max(seconds, transition.state.lease)


def _states(ledger: Ledger) -> list[wire.BucketState]:
    """The known digests of the state after the last committed step."""
    agreed = enumerate(ledger.copies.digests(ledger.training.step))
    return [wire.BucketState(bucket=bucket, digest=bytes.fromhex(digest)) for bucket, digest in agreed if digest]

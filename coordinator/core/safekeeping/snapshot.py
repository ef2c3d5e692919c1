"""Snapshots: the run's state after a step, written to a destination.

A checkpoint goes to the run's shared URL, each bucket written by one node, and is whole with its manifest. A snapshot on disks is
for stages that would otherwise be lost with one machine: each node writes all that it trains to its own disk, then others fetch
what is on one machine alone. It is whole when each part is on two machines, or cannot be; the one before can go then.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dtfm.coordinator.core.charging import quarantine
from dtfm.coordinator.core.ending import fail, fail_or_suspend
from dtfm.coordinator.core.messages import peer_message
from dtfm.coordinator.core.safekeeping.availability import on_disk, parameter_bytes
from dtfm.coordinator.core.safekeeping.donors import donors_at_work
from dtfm.coordinator.core.safekeeping.files import same_file, settle_files
from dtfm.coordinator.core.safekeeping.machines import machines, machines_of
from dtfm.coordinator.core.safekeeping.standby import rests_on_one_machine
from dtfm.coordinator.core.state import ATTEMPTS, Admission, Destination, Layers, Session, SnapshotTally, State
from dtfm.coordinator.core.transition import ManifestDone, TidyCheckpoints, Transition, WriteManifest
from dtfm.coordinator.core.trust.standing import is_alone, weakest
from dtfm.coordinator.core.trust.verdict import Against, OfTheRun, against_one, blame, named_twice
from dtfm.coordinator.core.validation.files import check_own_layers, check_parts
from dtfm.coordinator.core.validation.refusal import shorten
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import control_pb2 as wire
from dtfm.protos.checkpoint_names import step_folder

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

MOST_CHECKPOINTS = 4
"""The number of checkpoints under way. If another one begins, the oldest is given up."""

Holders = Mapping[int, Sequence[str]]
"""By bucket, the connected nodes that have it on disk."""


def begin(transition: Transition, step: int, checkpoint: bool) -> wire.SnapshotDestination:
    """What the plan's nodes write after the commit of ``step``, which is then under way. ``checkpoint``: one is due."""
    state, plan = transition.state, transition.state.ledger.plan
    assert plan is not None
    writers = {node: stage.layers for stage in plan.stages for node in stage.replicas}
    next_on_disks = state.safekeeping.next_on_disks
    if next_on_disks is None or checkpoint:
        pause = PAUSE_LEASES * state.lease
        transition.set_safekeeping(replace(state.safekeeping, next_on_disks=transition.now + pause))
    if checkpoint:
        pending = [s for s in state.safekeeping.snapshots if s.destination is Destination.CHECKPOINT]
        if len(pending) >= MOST_CHECKPOINTS:
            reason = f"it was not done when that of step {step} began; raise checkpoint.every"
            _give_up(transition, min(pending, key=lambda s: s.step), reason)
        due = transition.now + state.patience
        tally = SnapshotTally(step, Destination.CHECKPOINT, transition.now, writers, due, heard=transition.now)
        tally = replace(tally, due_from=_writers(state))
        safekeeping = transition.state.safekeeping.with_snapshot(tally)
        transition.set_safekeeping(replace(safekeeping, unfinished=safekeeping.unfinished | {step}))
        return wire.CHECKPOINT
    under_way = state.safekeeping.snapshot(Destination.DISKS)
    if next_on_disks is None or under_way or transition.now < next_on_disks or not rests_on_one_machine(state):
        return wire.NO_SNAPSHOT
    longest = max(_state_bytes(state, layers) for layers in writers.values()) / DISK_BANDWIDTH
    tally = SnapshotTally(
        step, Destination.DISKS, transition.now, writers, due=_due(transition, longest), heard=transition.now
    )
    transition.set_safekeeping(transition.state.safekeeping.with_snapshot(tally))
    return wire.DISKS


def claimed(transition: Transition, session: Session, claims: Collection[wire.SnapshotParts]) -> None:
    """A node that has just joined says what is on its disk. It gives no digests: only buckets that it had when the snapshot
    became whole count. Of a step that was trained again since then, it may have other files."""
    described, whole = transition.state.ledger.described, transition.state.ledger.on_disks
    assert described is not None
    for claim in claims:
        check_parts(claim, described.buckets, digest_bytes=0)
    mine = whole.buckets_of(session.node) if whole is not None else frozenset[int]()
    on_disk = {claim.step: mine.intersection(part.bucket for part in claim.parts) for claim in claims}
    counting = {step: buckets for step, buckets in on_disk.items() if whole is not None and step == whole.step}
    transition.set_session(replace(session, on_disk=counting))
    if claims:
        transition.send([session.node], wire.CoordinatorMessage(keep_snapshots=_to_keep(transition.state)))


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
        told = _own_parts(transition, tally, node, told)
        tally = replace(tally, told_by={**dict.fromkeys(told, node), **tally.told_by})
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
        _continue_checkpoint(transition, tally, node, shorten(message.problem))
        return
    all_mine = session.on_disk.get(tally.step, frozenset()) | mine
    transition.set_session(replace(session, on_disk={**session.on_disk, tally.step: all_mine}))
    _continue_on_disks(transition, tally)


def manifest_done(transition: Transition, done: ManifestDone) -> None:
    step, problem, bucket = done.step, done.problem, done.bucket
    tally = transition.state.safekeeping.snapshot(Destination.CHECKPOINT, step)
    if tally is None:
        return
    if problem:
        suspects = [who for number, who in tally.told_by.items() if number == bucket]
        _give_up(transition, tally, problem, suspects, undecided=True)  # others may have removed the file
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
            target.uri, ledger.run_id, ledger.checkpoint_step, target.keep, under_way, unfinished - under_way
        )
    )


def node_left(transition: Transition, node: str) -> None:
    """What the node was to write or to fetch is not awaited any more, even if it returns."""
    for tally in transition.state.safekeeping.snapshots:
        if tally.destination is Destination.DISKS:
            tally = _without(tally, node)
            transition.set_safekeeping(transition.state.safekeeping.with_snapshot(tally))
            _continue_on_disks(transition, tally)
        elif node in tally.writers:
            transition.set_safekeeping(transition.state.safekeeping.without_snapshot(tally))
            transition.emit(ev.CheckpointFailed(tally.step, f"{node} left before its part was written"))


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
                _give_up(transition, tally, problem, tally.writers)
        elif transition.now > tally.due:
            transition.log(f"the snapshot of step {tally.step} does not wait any longer for {late}")
            if tally.writers:
                _continue_on_disks(transition, replace(tally, writers={}))
            else:
                _end_with_what_there_is(transition, tally)
        elif not tally.writers and tally.fetching and donors_at_work(transition.state):
            _end_with_what_there_is(transition, tally)


def rolled_back(transition: Transition) -> None:
    """Training has gone back: snapshots of later steps no longer belong to its history."""
    step = transition.state.ledger.step
    for tally in transition.state.safekeeping.snapshots:
        if tally.step <= step:
            continue
        if tally.destination is Destination.DISKS:
            _give_up(transition, tally, f"training goes back to step {step}")
        else:
            transition.set_safekeeping(transition.state.safekeeping.without_snapshot(tally))
    if transition.state.safekeeping.snapshot(Destination.DISKS) is None:
        _tidy(transition)


def source(state: State) -> wire.SnapshotSource:
    """The whole snapshot of the last committed step, for nodes that read it."""
    ledger = state.ledger
    if (whole := ledger.on_disks) is not None and whole.step == ledger.step:
        holders = on_disk(state, whole.step, range(len(whole.parts)))
        if len(holders) == len(whole.parts):
            parts = [_part(b, whole.parts[b], nodes) for b, nodes in holders.items()]
            return wire.SnapshotSource(parts=parts, states=_states(ledger))
    manifest = bytes.fromhex(ledger.manifests.get(ledger.step, ""))
    folder = ledger.checkpoints.get(ledger.step, "")
    return wire.SnapshotSource(folder=folder, manifest=manifest, states=_states(ledger) if folder else ())


def pause_after(seconds: float, lease: float) -> float:
    """Seconds between two snapshots on disks of which the last took ``seconds``: the square root of twice the cost times the mean
    time between losses (Young, "A first order approximation to the optimum checkpoint interval", 1974), but at most TIME_FRACTION
    of the time goes into them."""
    return max(PAUSE_LEASES * lease, math.sqrt(2 * seconds * LOSS_LEASES * lease), seconds / TIME_FRACTION)


def _continue_checkpoint(transition: Transition, tally: SnapshotTally, node: str, problem: str) -> None:
    """Once all buckets are written, by whichever nodes, the manifest makes the checkpoint whole."""
    if _has_all_buckets(transition.state, tally):
        transition.set_safekeeping(transition.state.safekeeping.with_snapshot(replace(tally, writers={})))
        folder = step_folder(transition.state.run.checkpoint.uri, tally.step)
        parts = tuple(tally.parts[bucket] for bucket in sorted(tally.parts))
        transition.commands.append(WriteManifest(tally.step, folder, parts))
    elif problem:
        _give_up(transition, tally, f"{node} could not write its part: {problem}", (node,))
    elif not tally.writers:
        assert transition.state.ledger.described is not None
        missing = min(set(range(transition.state.ledger.described.buckets)) - tally.parts.keys())
        problem = f"bucket {missing} was written by no node"
        _give_up(transition, tally, problem, tally.due_from[missing])


def _continue_on_disks(transition: Transition, tally: SnapshotTally) -> None:
    """Once all is written: what is on one machine alone is fetched by others; once that is there, the snapshot is whole."""
    if tally.writers:
        return
    tally = settle_files(transition, tally)
    state = transition.state
    if (holders := _all_on_disk(state, tally)) is None:
        _give_up(transition, tally, "some of it is on no disk")
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
        _end_with_what_there_is(transition, tally)


def _end_with_what_there_is(transition: Transition, tally: SnapshotTally) -> None:
    """The snapshot on disks is whole if every bucket is on the disk of a node that is here."""
    if (holders := _all_on_disk(transition.state, tally)) is None:
        _give_up(transition, tally, "some of it is on no disk")
        return
    parts = tuple(tally.parts[bucket] for bucket in sorted(holders))
    by_node: dict[str, list[int]] = {}
    for bucket, nodes in holders.items():
        for node in nodes:
            by_node.setdefault(node, []).append(bucket)
    ranges = {node: _ranges(buckets) for node, buckets in sorted(by_node.items())}
    transition.emit(ev.SnapshotWritten(tally.step, parts, ranges, transition.now - tally.since))
    _end_on_disks(transition, tally)


def _give_up(
    transition: Transition, tally: SnapshotTally, reason: str, suspects: Collection[str] = (), undecided: bool = False
) -> None:
    """Abandons the snapshot; the previous one stays. Training goes on, without one of the ``suspects``, if checkpoints failed
    because of it again and again; ``undecided``: it may not be at fault. Without the last checkpoint nothing would remain of the
    run: it is written again (post_commit.py), unless nobody or everybody is to blame; then the run fails."""
    if tally.destination is Destination.DISKS:
        transition.log(f"no snapshot of step {tally.step} on disks: {reason}")
        _end_on_disks(transition, tally)
        return
    transition.set_safekeeping(transition.state.safekeeping.without_snapshot(tally))
    ledger = transition.state.ledger
    accused = weakest(ledger, suspects) if suspects else ""
    transition.emit(ev.CheckpointFailed(tally.step, reason, accused))
    failures = transition.state.ledger.checkpoint_failures
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
    plan, described = state.ledger.plan, state.ledger.described
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


def _own_parts(
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


def _end_on_disks(transition: Transition, tally: SnapshotTally) -> None:
    """The pause before the next one is counted from the last report: waiting for a node in vain costs nothing."""
    cost = tally.heard - tally.since
    safekeeping = transition.state.safekeeping.without_snapshot(tally)
    transition.set_safekeeping(
        replace(safekeeping, next_on_disks=transition.now + pause_after(cost, transition.state.lease) - cost)
    )
    _tidy(transition)


def _tidy(transition: Transition) -> None:
    """With no snapshot under way, disks keep only the whole one."""
    to_keep = _to_keep(transition.state)
    sessions = transition.state.members.sessions
    for session in [s for s in sessions.values() if s.on_disk]:
        kept = {step: buckets for step, buckets in session.on_disk.items() if step == to_keep.whole}
        transition.set_session(replace(session, on_disk=kept))
    joined = [s.node for s in sessions.values() if s.admission is not Admission.JOINED]
    transition.send(joined, wire.CoordinatorMessage(keep_snapshots=to_keep))


def _to_keep(state: State) -> wire.KeepSnapshots:
    """The snapshots that every node should keep."""
    whole, tally = state.ledger.on_disks, state.safekeeping.snapshot(Destination.DISKS)
    return wire.KeepSnapshots(whole=whole.step if whole else 0, under_way=tally.step if tally else 0)


def _to_fetch(state: State, tally: SnapshotTally, holders: Holders, buckets: Collection[int]) -> wire.KeepSnapshots:
    to_keep = _to_keep(state)
    to_keep.missing.extend(_part(bucket, tally.parts[bucket], holders[bucket]) for bucket in sorted(buckets))
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
        row = state.ledger.links.get(holder, {})
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
    holders = on_disk(state, tally.step, tally.parts)
    return holders if _has_all_buckets(state, tally) and len(holders) == len(tally.parts) else None


def _has_all_buckets(state: State, tally: SnapshotTally) -> bool:
    assert state.ledger.described is not None
    return len(tally.parts) == state.ledger.described.buckets


def _without(tally: SnapshotTally, node: str) -> SnapshotTally:
    """``node`` is not awaited any more."""
    writers = {name: layers for name, layers in tally.writers.items() if name != node}
    fetching = {name: buckets for name, buckets in tally.fetching.items() if name != node}
    return replace(tally, writers=writers, fetching=fetching)


def _due(transition: Transition, seconds: float) -> float:
    """The deadline for a part that should take ``seconds``."""
    return transition.now + PATIENCE_FACTOR * max(seconds, transition.state.lease)


def _state_bytes(state: State, layers: Layers) -> float:
    assert state.ledger.described is not None
    return parameter_bytes(state, layers) * state.ledger.described.workload.bytes_moved_per_parameter_byte


def _states(ledger: Ledger) -> list[wire.BucketState]:
    """What is known of the state after the last committed step."""
    agreed = enumerate(ledger.agreed.get(ledger.step, ()))
    return [wire.BucketState(bucket=bucket, digest=bytes.fromhex(digest)) for bucket, digest in agreed if digest]


def _part(bucket: int, part: ev.SnapshotPart, nodes: Sequence[str]) -> wire.Part:
    return wire.Part(bucket=bucket, size_bytes=part.size_bytes, digest=bytes.fromhex(part.digest), nodes=nodes)


def _ranges(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Rising ``numbers`` as ranges [first, past_last)."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return tuple(ranges)

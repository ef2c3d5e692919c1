"""Backups: the run's state as of some step on the nodes' own disks, for stages that would else be lost with one node.

After a commit all nodes of the plan write what they train to their own disk. What but one of them has so, another node then
fetches, at its leisure. When each part is on two disks, or cannot be, the backup is whole, and the one before can go.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dtfm.coordinator.core.standby import donors_at_work, rests_on_one
from dtfm.coordinator.core.state import Backing, Session, Standing, State
from dtfm.coordinator.core.transition import Turn
from dtfm.coordinator.core.validation import check_kept, check_own, shorten
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan

BACKUP_LEASES = 6
"""From one backup to the next at least so many leases pass."""

LOSS_LEASES = 360
"""Once in so many leases a stage is taken to be lost that rests on one node: an hour, where the lease is ten seconds."""

BACKUP_SHARE = 0.2
"""Of the time: so much backups may take, and of links what they need in it."""

TIMES = 10
"""Nodes have so many times as long as it should take, and at least so many leases, to write a backup, and then to fetch."""

DISK_BANDWIDTH = 100e6
"""Bytes per second that a node's disk should write; see TIMES for one that is slower or busy."""

Holders = Mapping[int, Sequence[str]]
"""By bucket: the nodes that are here and have it on disk."""


def begin(turn: Turn, step: int, plan: Plan, checkpoint: bool) -> bool:
    """Whether the nodes of ``plan`` are to write a backup after the commit of ``step``, which is then under way; ``checkpoint``:
    whether they write one of these."""
    _end_if_due(turn)
    state = turn.state
    if state.next_backup is None or checkpoint:
        turn.set(next_backup=turn.now + BACKUP_LEASES * state.lease)
        return False
    if state.backing is not None or turn.now < state.next_backup or not rests_on_one(state):
        return False
    writers = {node: stage.layers for stage in plan.stages for node in stage.replicas}
    longest = max(_state_bytes(state, layers) for layers in writers.values()) / DISK_BANDWIDTH
    turn.set(backing=Backing(step, turn.now, writers, due=_due(turn, longest), heard=turn.now))
    return True


def claimed(turn: Turn, session: Session, claims: Collection[wire.Kept]) -> None:
    """What a node that has just come says it has on disk, of earlier. It says no digests: what counts is what it had when the
    whole backup became whole. Of a step that was trained again since it may have other files."""
    described, state = turn.state.ledger.described, turn.state
    assert described is not None
    for claim in claims:
        check_kept(claim, described.buckets, digest_bytes=0)
    backup = state.ledger.backup
    mine = held(backup, session.node) if backup is not None else frozenset[int]()
    claimed = {claim.step: mine.intersection(part.bucket for part in claim.parts) for claim in claims}
    turn.update(
        session, kept={step: some for step, some in claimed.items() if backup is not None and step == backup.step}
    )
    if claims:
        turn.send([session.node], keep=_wanted(state))


def kept(turn: Turn, session: Session, message: wire.Kept) -> None:
    """The node has written or fetched its parts of the backup under way, or could not."""
    described, backing, node = turn.state.ledger.described, turn.state.backing, session.node
    assert described is not None
    check_kept(message, described.buckets)
    if backing is None or message.step != backing.step or node not in backing.writers.keys() | backing.asked.keys():
        turn.log(f"ignored what {node} keeps of step {message.step}: it was not asked for that")
        return
    if node in backing.writers:
        check_own(message, backing.writers[node], len(described.workload.layers))
    told = {part.bucket: ev.BackupPart(part.size_bytes, part.digest.hex()) for part in message.parts}
    parts = {**told, **backing.parts} if node in backing.writers else backing.parts
    mine = frozenset(bucket for bucket, part in told.items() if parts.get(bucket) == part)
    if len(mine) < len(told):
        turn.log(f"{node} keeps {len(told) - len(mine)} buckets of step {message.step} in other files than the others")
    if message.problem:
        turn.log(f"{node} cannot keep all that it was to of step {message.step}: {shorten(message.problem)}")
    unable = bool(message.problem) or not backing.asked.get(node, frozenset()) <= mine
    turn.update(session, kept={**session.kept, backing.step: session.kept.get(backing.step, frozenset()) | mine})
    turn.set(
        backing=replace(
            backing,
            writers={other: layers for other, layers in backing.writers.items() if other != node},
            heard=turn.now,
            parts=parts,
            asked={other: buckets for other, buckets in backing.asked.items() if other != node},
            unable=backing.unable | {node} if unable else backing.unable,
        )
    )
    _advance(turn)


def left(turn: Turn, node: str) -> None:
    """What the node was to write or to fetch is not awaited any more, even if it comes back."""
    backing = turn.state.backing
    if backing is not None and not turn.state.stopped:
        asked = {other: buckets for other, buckets in backing.asked.items() if other != node}
        writers = {other: layers for other, layers in backing.writers.items() if other != node}
        turn.set(backing=replace(backing, writers=writers, asked=asked))
        _advance(turn)


def make_way(turn: Turn) -> None:
    """Nothing is fetched any more from nodes of which others need the state itself: their links are wanted for that, and what
    has come that way is safe too. What is on one disk stays on one."""
    backing = turn.state.backing
    if turn.state.stopped or backing is None or backing.writers or not backing.asked:
        return
    if donors_at_work(turn.state):
        _whole(turn, backing, _holders(turn.state, backing.step, backing.parts))


def give_up(turn: Turn, why: str) -> None:
    """The backup under way comes to nothing; the one before stays."""
    backing = turn.state.backing
    assert backing is not None
    turn.log(f"no backup of step {backing.step}: {why}")
    _over(turn, backing)


def rolled_back(turn: Turn) -> None:
    """Training has gone back: what is of later steps, on any disk, is of another past."""
    backing, step = turn.state.backing, turn.state.ledger.step
    if backing is not None and backing.step > step:
        give_up(turn, f"training goes back to step {step}")
    elif backing is None:
        _tidy(turn)


def restorable(state: State, step: int) -> bool:
    """Whether the nodes that are here have the whole state as of ``step`` on disk."""
    return step > 0 and step == restorable_step(state)


def restorable_step(state: State) -> int:
    """Step of the whole backup, if the nodes that are here have all of it on disk; else 0."""
    backup = state.ledger.backup
    return backup.step if backup is not None and len(_parts(state, backup)) == len(backup.parts) else 0


def held(backup: ev.BackupKept, node: str) -> frozenset[int]:
    """The buckets that the node had on disk when the backup became whole."""
    return frozenset(bucket for first, past in backup.holders.get(node, ()) for bucket in range(first, past))


def backup_parts(state: State) -> list[wire.Part]:
    """The whole backup as nodes are told of it."""
    backup = state.ledger.backup
    return _parts(state, backup) if backup is not None else []


def _end_if_due(turn: Turn) -> None:
    """Who has not done its part of the backup under way by now is not awaited any more: what is on one disk stays on one, and
    what is on none ends it."""
    backing = turn.state.backing
    if backing is None or turn.now <= backing.due:
        return
    late = sorted(backing.writers.keys() | backing.asked.keys())
    turn.log(f"the backup of step {backing.step} does not wait any longer for {', '.join(late)}")
    if backing.writers:
        turn.set(backing=replace(backing, writers={}))
        _advance(turn)
    else:
        _whole(turn, backing, _holders(turn.state, backing.step, backing.parts))


def _advance(turn: Turn) -> None:
    """Once all is written: what is on one disk alone is fetched by others; once that is there, the backup is whole."""
    state, backing, described = turn.state, turn.state.backing, turn.state.ledger.described
    assert backing is not None
    assert described is not None
    if backing.writers:
        return
    holders = _holders(state, backing.step, backing.parts)
    if len(holders) < described.buckets:
        give_up(turn, "some of it is on no disk")
        return
    asked = dict(backing.asked)
    coming = frozenset().union(*asked.values())
    single = {bucket: who[0] for bucket, who in holders.items() if len(who) == 1 and bucket not in coming}
    fetchers = _fetchers(state, backing, single)
    for node, (buckets, _) in fetchers.items():
        asked[node] = asked.get(node, frozenset()) | buckets
        turn.send([node], keep=_order(state, backing, holders, asked[node]))
    due = max([backing.due, *(_due(turn, seconds) for _, seconds in fetchers.values())])
    turn.set(backing=replace(backing, asked=asked, due=due))
    if not asked:
        _whole(turn, backing, holders)


def _whole(turn: Turn, backing: Backing, holders: Holders) -> None:
    parts = tuple(backing.parts[bucket] for bucket in sorted(holders))
    by_node: dict[str, list[int]] = {}
    for bucket, who in sorted(holders.items()):
        for node in who:
            by_node.setdefault(node, []).append(bucket)
    ranges = {node: _ranges(buckets) for node, buckets in sorted(by_node.items())}
    turn.emit(ev.BackupKept(backing.step, parts, ranges, turn.now - backing.since))
    _over(turn, backing)


def _over(turn: Turn, backing: Backing) -> None:
    """The next one begins when this one has paid, and taken but BACKUP_SHARE of the time in between. To wait for somebody in vain
    costs nothing."""
    cost = backing.heard - backing.since
    turn.set(backing=None, next_backup=turn.now + pause_after(cost, turn.state.lease) - cost)
    _tidy(turn)


def pause_after(seconds: float, lease: float) -> float:
    """Seconds from one backup that took ``seconds`` to the next: by Young's rule ("A first order approximation to the optimum
    checkpoint interval", 1974) the square root of twice its cost times the time between losses. So a disk that a backup fills
    for long is not written to all the time."""
    worth = math.sqrt(2 * seconds * LOSS_LEASES * lease)
    return max(BACKUP_LEASES * lease, worth, seconds / BACKUP_SHARE)


def _tidy(turn: Turn) -> None:
    """Nothing is under way: all disks keep the whole backup alone, and nothing else counts."""
    keep = _wanted(turn.state)
    for session in [s for s in turn.state.sessions.values() if s.kept]:
        turn.update(session, kept={step: buckets for step, buckets in session.kept.items() if step == keep.whole})
    turn.send([s.node for s in turn.state.sessions.values() if s.standing is not Standing.JOINED], keep=keep)


def _wanted(state: State) -> wire.Keep:
    """What any node is to have on disk."""
    backup, backing = state.ledger.backup, state.backing
    return wire.Keep(whole=backup.step if backup else 0, begun=backing.step if backing else 0)


def _order(state: State, backing: Backing, holders: Holders, buckets: Collection[int]) -> wire.Keep:
    keep = _wanted(state)
    keep.missing.extend(_part(bucket, backing.parts[bucket], holders[bucket]) for bucket in sorted(buckets))
    names = sorted({name for part in keep.missing for name in part.nodes})
    keep.peers.extend(wire.Peer(node=name, address=state.sessions[name].address) for name in names)
    return keep


def _due(turn: Turn, seconds: float) -> float:
    """By when that is done which should take so long."""
    return turn.now + TIMES * max(seconds, turn.state.lease)


def _state_bytes(state: State, layers: tuple[int, int]) -> float:
    described = state.ledger.described
    assert described is not None
    size = sum(layer.parameter_bytes for layer in described.workload.layers[slice(*layers)])
    return size * described.workload.bytes_moved_per_parameter_byte


def _fetchers(state: State, backing: Backing, single: Mapping[int, str]) -> Mapping[str, tuple[frozenset[int], float]]:
    """Who is to fetch which of the buckets that but one node has each (``single``), and in how many seconds, if nothing else
    fills the links: all of that node's go to the one that will have them first, by its link and by what it fetches besides.
    Nobody fetches from `donors_at_work`."""
    fetchers: dict[str, tuple[frozenset[int], float]] = {}
    load: dict[str, float] = {}
    for holder in sorted(set(single.values()) - donors_at_work(state)):
        buckets = frozenset(bucket for bucket, who in single.items() if who == holder)
        size = sum(backing.parts[bucket].size_bytes for bucket in buckets)
        row = state.ledger.links.get(holder, {})
        links = {n: row[n].bandwidth for n in state.staying if n in row and n != holder and n not in backing.unable}
        seconds = {node: (load.get(node, 0.0) + size) / bandwidth for node, bandwidth in links.items() if bandwidth}
        if seconds:
            node = min(seconds, key=lambda n: (seconds[n], n))
            others, before = fetchers.get(node, (frozenset[int](), 0.0))
            fetchers[node] = others | buckets, max(before, seconds[node])
            load[node] = load.get(node, 0.0) + size
    return fetchers


def _parts(state: State, backup: ev.BackupKept) -> list[wire.Part]:
    """Those that are on the disk of a node that is here."""
    parts = dict(enumerate(backup.parts))
    return [_part(bucket, parts[bucket], who) for bucket, who in _holders(state, backup.step, parts).items()]


def _holders(state: State, step: int, buckets: Collection[int]) -> Holders:
    holders: dict[int, list[str]] = {}
    for node, session in sorted(state.sessions.items()):
        for bucket in session.kept.get(step, frozenset()).intersection(buckets):
            holders.setdefault(bucket, []).append(node)
    return dict(sorted(holders.items()))


def _part(bucket: int, part: ev.BackupPart, nodes: Sequence[str]) -> wire.Part:
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

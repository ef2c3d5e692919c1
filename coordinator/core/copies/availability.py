"""The table of copies: the nodes with each part of the model's state, its step, and its place: memory or disk. Donors, commits,
waiting, going back and planning all read this table."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dtfm.coordinator.core.givers import believed
from dtfm.coordinator.core.phases import Switching
from dtfm.coordinator.core.state.copies import Layers, Standby
from dtfm.coordinator.core.state.session import Admission, Session
from dtfm.coordinator.core.state.state import State

MOST_DONORS = 8
"""The number of donors that a standby is named for each layer: those with the fastest links to it."""


class Kind(enum.Enum):
    """Where training can go on from."""

    MEMORY = "memory"
    DISK = "disk"
    CHECKPOINT = "checkpoint"
    WEIGHTS = "weights"
    """A checkpoint without moments. Training resumes from it only if an operator has said so."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One bucket's state after ``step``. ``here``: the copy can be used now; otherwise when its node returns, or is ready."""

    node: str
    step: int
    here: bool = True


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Training can resume after ``step``. At step 0 the state follows from the seed, and ``kind`` is None."""

    step: int
    kind: Kind | None


@dataclass(frozen=True, slots=True)
class Availability:
    """``memory``: by layer, the copies in memory. A bucket that several layers use is wherever any of these layers is.
    ``disks``: by bucket, the copies in whole snapshots on disks. ``checkpoint``: the step of the newest checkpoint from which
    training may resume; 0: none. ``weights``: the checkpoint has only weights."""

    memory: tuple[tuple[Copy, ...], ...]
    disks: tuple[tuple[Copy, ...], ...]
    checkpoint: int
    weights: bool = False

    def in_memory(self, step: int) -> tuple[frozenset[str], ...]:
        """Per layer, the ready nodes that have its state as of ``step`` in memory."""
        return tuple(frozenset(copy.node for copy in layer if copy.here and copy.step == step) for layer in self.memory)

    def resume_point(self, returning: Collection[str] = ()) -> ResumePoint:
        """The newest point to resume from, with the nodes that are ready and the ``returning`` nodes."""
        in_memory, on_disks = _common_steps(self.memory, returning), _common_steps(self.disks, returning)
        step = max((self.checkpoint, *in_memory, *on_disks))
        if step == 0:
            return ResumePoint(0, None)
        on = Kind.DISK if step in on_disks else Kind.WEIGHTS if self.weights else Kind.CHECKPOINT
        return ResumePoint(step, Kind.MEMORY if step in in_memory else on)

    def needed(self, point: ResumePoint, returning: Collection[str]) -> frozenset[str]:
        """The ``returning`` nodes that have a part of the state at ``point`` that no ready node has."""
        if point.kind in (None, Kind.CHECKPOINT, Kind.WEIGHTS):
            return frozenset()
        table = self.memory if point.kind is Kind.MEMORY else self.disks
        wanted = [[copy for copy in bucket if copy.step == point.step] for bucket in table]
        missing = [copies for copies in wanted if not any(copy.here for copy in copies)]
        return frozenset(copy.node for copies in missing for copy in copies).intersection(returning)


def availability(state: State) -> Availability:
    """The table now. Memory counts of one island: the first that is whole, or would be whole if the absent nodes returned."""
    ledger, islands = state.ledger, state.ledger.training.islands

    def replicas(island: int) -> list[list[Copy]]:
        return [
            [
                copy
                for node, process in processes
                if islands.get(node, 0) == island and (copy := _replica(state, node, process)) is not None
            ]
            for processes in ledger.training.held
        ]

    tables = [replicas(island) for island in ledger.whole_islands or sorted({*islands.values()}) or [0]]
    memory = next(filter(all, tables), tables[0])
    for node in ledger.ready if memory else ():
        standby = state.members.sessions[node].standby
        # Training cannot go on from an older one.
        if standby is not None and standby.is_of_all and step_of(standby, state) == ledger.training.step:
            for layer in range(*standby.layers):
                memory[layer].append(Copy(node, ledger.training.step))
    checkpoint = ledger.copies.resumable_step
    weights = checkpoint > 0 and ledger.copies.checkpoints[checkpoint].weights
    return Availability(tuple(map(tuple, memory)), _disks(state), checkpoint, weights)


def step_of(standby: Standby, state: State) -> int | None:
    """The last step that the standby's copy includes. The last commit counts if the standby has its gradients. None: the standby
    is still copying."""
    training, following = state.ledger.training, standby.rounds.next_rest(standby.step)
    last = training.last
    if last is not None and (following, standby.voted) == (last.step, last.generation) and following == training.step:
        return following
    return standby.step if standby.caught_up is not None else None


def standbys_of(state: State) -> Mapping[str, Standby]:
    """By node, the standbys whose request still holds."""
    sessions = state.members.sessions
    standbys = {node: standby_of(state, sessions[node]) for node in state.ledger.ready}
    return {node: standby for node, standby in standbys.items() if standby is not None}


def standby_of(state: State, session: Session) -> Standby | None:
    """The session's standby. None: it has no request, or a later plan with the node has ended it."""
    standby, plan = session.standby, state.ledger.training.plan
    if standby is None or plan is None:
        return None
    is_another_plan = standby.generation != state.ledger.training.generation
    ended = is_another_plan and (session.node in plan.nodes or standby.rounds != state.rounds)
    return None if ended else standby


def on_disk(state: State, step: int, buckets: Collection[int]) -> Mapping[int, tuple[str, ...]]:
    """By bucket, the connected nodes that have the bucket on disk in the snapshot of ``step``, which may be unfinished. Buckets
    on no disk are left out."""
    holders: dict[int, list[str]] = {}
    for node, session in sorted(state.members.sessions.items()):
        for bucket in session.on_disk.get(step, frozenset()).intersection(buckets):
            holders.setdefault(bucket, []).append(node)
    return {bucket: tuple(nodes) for bucket, nodes in sorted(holders.items())}


def fastest_donors(state: State, node: str, holders: Sequence[str]) -> tuple[str, ...]:
    """The ``holders`` of a layer with the fastest links to ``node``, the fastest first. Leaves out ``node`` itself, and holders
    that it should not believe."""

    def bandwidth(donor: str) -> float:
        link = state.ledger.reach.links.get(donor, {}).get(node)
        return link.bandwidth if link is not None else 0.0

    others = [holder for holder in believed(state.ledger, node, holders) if holder != node]
    return tuple(sorted(others, key=lambda donor: (-bandwidth(donor), donor))[:MOST_DONORS])


def donors_at_work(state: State) -> frozenset[str]:
    """Nodes whose state others fetch for the plan that is about to begin, or copy as standbys that have not caught up."""
    plan, holders = state.ledger.training.plan, state.ledger.holders
    wanted = [standby.layers for standby in standbys_of(state).values() if standby.caught_up is None]
    if isinstance(state.phase, Switching) and plan is not None:
        wanted += [
            stage.layers
            for stage in plan.stages
            if not all(set(nodes).issuperset(stage.replicas) for nodes in holders[slice(*stage.layers)])
        ]
    return frozenset(node for layers in wanted for nodes in holders[slice(*layers)] for node in nodes)


def is_under_way(state: State, step: int) -> bool:
    """Whether the state after ``step`` is being written to the disks, or sent to a checkpoint."""
    kept = state.safekeeping
    return any(each is not None and each.step == step for each in (kept.snapshot, kept.upload))


def parameter_bytes(state: State, layers: Layers) -> float:
    described = state.ledger.description
    return sum(layer.parameter_bytes for layer in described.workload.layers[slice(*layers)])


def moved_bytes(state: State, layers: Layers) -> float:
    """Of the layers' whole state."""
    workload = state.ledger.description.workload
    return sum(workload.moved(each.parameter_bytes, each.orthogonal_bytes) for each in workload.layers[slice(*layers)])


def orthogonal_bytes(state: State, layers: Layers) -> float:
    described = state.ledger.description
    return sum(layer.orthogonal_bytes for layer in described.workload.layers[slice(*layers)])


def frozen_bytes(state: State, layers: Layers) -> float:
    described = state.ledger.description
    return sum(layer.frozen_bytes for layer in described.workload.layers[slice(*layers)])


def _replica(state: State, node: str, process: str) -> Copy | None:
    """The node's copy. None: the process is gone for good, since it has ended, or another process has joined as this node."""
    session, member = state.members.sessions.get(node), state.ledger.members.get(node)
    if node in state.members.ended if member is None else member.incarnation != process:
        return None
    here = session is not None and session.admission is Admission.READY
    return Copy(node, state.ledger.training.step, here)


def _disks(state: State) -> tuple[tuple[Copy, ...], ...]:
    ledger, sessions = state.ledger, state.members.sessions
    if ledger.described is None:
        return ()
    files: list[list[Copy]] = [[] for _ in range(ledger.described.buckets)]
    for snapshot in ledger.copies.on_disks.values():
        for bucket, nodes in on_disk(state, snapshot.step, range(len(files))).items():
            files[bucket] += [Copy(node, snapshot.step) for node in nodes]
        for node in snapshot.holders:
            session = sessions.get(node)
            has_reported = session is not None and session.admission is not Admission.JOINED
            if not has_reported and ledger.quarantine_of(node) is None:
                for bucket in snapshot.buckets_of(node):
                    files[bucket].append(Copy(node, snapshot.step, here=False))
    return tuple(map(tuple, files))


def _common_steps(table: tuple[tuple[Copy, ...], ...], returning: Collection[str]) -> set[int]:
    """The steps that every bucket has a copy of."""
    steps = [{copy.step for copy in bucket if copy.here or copy.node in returning} for bucket in table]
    return set.intersection(*steps) if steps else set()

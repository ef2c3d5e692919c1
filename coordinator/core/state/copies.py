"""Copies of the model's state that are being made: standbys, snapshots on disks, and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dtfm.coordinator.core.state.planner import PlanChosen
from dtfm.coordinator.log.events import CheckpointFile, SnapshotPart
from dtfm.scheduler.model.rounds import NO_ROUNDS, Rounds

Layers = tuple[int, int]
"""[first, past_last)."""


@dataclass(frozen=True, slots=True)
class Standby:
    """A node that copies the state of some layers from other nodes, and keeps the copy up to date."""

    number: int
    """The number of the coordinator's request. A report with another number is ignored."""
    generation: int
    """The generation when the coordinator made the request."""
    layers: Layers
    """The layers that the standby copies."""
    caught_up: int | None = None
    """The last committed step when the standby first reported; None: it is still copying."""
    step: int = 0
    """The step of its copy, from its last report."""
    voted: int = 0
    """From its last report: if it has the gradients of the next step, the generation of their votes; 0: it has none."""
    reported: float = -math.inf
    """When it first reported this much."""
    ended: bool = False
    """Whether it has reported that it cannot go on."""
    caught_up_before: bool = False
    """Whether it had caught up under an earlier request for the same layers."""
    due: float = math.inf
    """When it should have caught up."""
    rounds: Rounds = NO_ROUNDS
    """The rounds of the plan in force when the request was made."""

    @property
    def is_of_all(self) -> bool:
        """Whether it copies the whole state. With rounds it copies no moments."""
        return not self.rounds.count


@dataclass(frozen=True, slots=True)
class Move:
    """What one node brings: to its own disk, or from there to a checkpoint."""

    stream: int
    """The node's stream when it was asked. If the node comes back on another stream, it is not awaited."""
    buckets: frozenset[int]
    """The buckets that have not arrived yet; empty: all have."""
    due: float
    """When all of them should have arrived."""


@dataclass(frozen=True, slots=True)
class Moves:
    """All moves of one snapshot, or of one checkpoint (copies/moving.py)."""

    by_node: Mapping[str, Move] = field(default_factory=dict)
    """By connected node, what it brings."""
    failed: frozenset[str] = frozenset()
    """Nodes that failed: others bring the rest. They are not asked again, unless a checkpoint's files are tried once more."""
    problem: str = ""
    """The last problem; empty before the first."""

    @property
    def under_way(self) -> frozenset[int]:
        """The buckets that are on their way."""
        return frozenset[int]().union(*(move.buckets for move in self.by_node.values()))

    def of(self, node: str) -> frozenset[int]:
        """The buckets that are awaited from this node."""
        return self.by_node[node].buckets if node in self.by_node else frozenset()


@dataclass(frozen=True, slots=True)
class SnapshotTally:
    """A snapshot that is being written to disks, and then spread over machines."""

    step: int
    """The snapshot has the state after this step."""
    since: float
    """When the snapshot began."""
    heard: float
    """The time of the last report."""
    spread: bool
    """Whether parts on only one machine are copied to another."""
    checkpoint: bool
    """Whether the snapshot goes to a checkpoint when all of it is written."""
    moves: Moves
    """What nodes write to their disks. Once ``parts`` are known: what nodes fetch from other disks."""
    parts: Mapping[int, SnapshotPart] = field(default_factory=dict)
    """By bucket, the file that counts. Empty until all writers have reported."""
    written: Mapping[int, Mapping[str, SnapshotPart]] = field(default_factory=dict)
    """By bucket and node, the file that the node reported."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A checkpoint that nodes are sending."""

    step: int
    """The checkpoint has the state after this step. The step names its folder."""
    place: str
    """The run's place for checkpoints."""
    weights: bool
    """Whether the checkpoint gets only weights."""
    parts: Mapping[int, SnapshotPart]
    """By bucket, the snapshot's file on the nodes' disks."""
    moves: Moves = field(default_factory=Moves)
    """What nodes send."""
    files: Mapping[int, CheckpointFile] = field(default_factory=dict)
    """By bucket, the file that has arrived."""
    sent_by: Mapping[int, str] = field(default_factory=dict)
    """By bucket that has arrived, its sender."""
    finishing: bool = False
    """Whether the manifest is being written."""
    again: float | None = None
    """When the missing files are tried again, as no other node is left; None: nothing waits for that."""
    attempts: int = 0
    """The number of times that the checkpoint had to wait for ``again``."""

    @property
    def missing(self) -> frozenset[int]:
        """The buckets whose files have not arrived."""
        return frozenset(self.parts.keys() - self.files.keys())

    @property
    def is_in_trouble(self) -> bool:
        return self.again is not None


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The inputs to the choice of standbys. ``timed``: a whole step of this generation has shown how long a step takes."""

    generation: int
    timed: bool
    chosen: PlanChosen | None
    ready: tuple[str, ...]
    staying: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Safekeeping:
    """Standbys, snapshots and checkpoints in progress."""

    standby_number: int = 0
    """The number of the last standby request."""
    arranged: Arrangement | None = None
    """The inputs to the last choice of standbys."""
    snapshot: SnapshotTally | None = None
    """The snapshot that nodes are writing, if there is one."""
    upload: Upload | None = None
    """The checkpoint that nodes are sending, if there is one."""
    next_spread: float | None = None
    """When parts on only one machine may next be copied to another; None: not known yet."""
    checkpoint_due: bool = False
    """Whether the next commit begins a checkpoint that had to wait for another."""
    next_checkpoint: float = -math.inf
    """If the last checkpoint failed, the time before which it is not tried again."""
    unfinished: frozenset[int] = frozenset()
    """The steps whose checkpoints began after old checkpoints were last deleted, and are not whole."""

"""What tells of the run's state: where it is kept, and whether it is what it should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """``manifest``: the BLAKE3 (hex) of its manifest; empty in logs of older versions."""

    step: int
    folder: str
    manifest: str = ""
    event: Literal["checkpoint_written"] = "checkpoint_written"


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """``node``: because of whom, if that is known."""

    step: int
    reason: str
    node: str = ""
    event: Literal["checkpoint_failed"] = "checkpoint_failed"


@dataclass(frozen=True, slots=True)
class StandbyPromoted:
    """A standby counts as a holder of ``layers`` [first, past_last): no replica of them is left, and its copy is as of
    ``step``."""

    node: str
    incarnation: str
    layers: tuple[int, int]
    step: int
    event: Literal["standby_promoted", "state_copied"] = "standby_promoted"


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """The file with one bucket's state. ``digest``: its BLAKE3 (hex); ``nonce``: what its name in a checkpoint has."""

    size_bytes: int
    digest: str
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class StateAgreed:
    """All who trained the state after ``step``, of which there is a snapshot or may soon be one, agree on its digests (hex, by
    bucket; empty where it is not known)."""

    step: int
    digests: tuple[str, ...]
    event: Literal["state_agreed"] = "state_agreed"


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """The state after ``step`` is on the nodes' own disks. ``parts`` are in order of bucket. ``holders``: by node, the
    buckets on its disk, as ranges [first, past_last). ``seconds``: since the commit of ``step``."""

    step: int
    parts: tuple[SnapshotPart, ...]
    holders: dict[str, tuple[tuple[int, int], ...]]
    seconds: float
    event: Literal["snapshot_written", "backup_kept"] = "snapshot_written"

    def buckets_of(self, node: str) -> frozenset[int]:
        """Those that the node had on its disk when the snapshot was whole."""
        return frozenset(bucket for first, past in self.holders.get(node, ()) for bucket in range(first, past))


@dataclass(frozen=True, slots=True)
class StateRefused:
    """Before ``generation`` began, ``node`` had other state of ``bucket`` after ``step`` than those who trained it. It says that
    it has it from ``donors``: several, if one of them broke off. It gets it again from others."""

    step: int
    generation: int
    node: str
    donors: tuple[str, ...]
    bucket: int
    event: Literal["state_refused"] = "state_refused"


@dataclass(frozen=True, slots=True)
class RolledBack:
    """No node holds some stage's state any more: training goes back from ``from_step`` to ``step``. ``folder`` is the checkpoint
    of that step; empty at step 0, and if the snapshot is on the nodes' disks."""

    step: int
    from_step: int
    folder: str
    reason: str
    event: Literal["rolled_back"] = "rolled_back"

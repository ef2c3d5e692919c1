"""Copies of the run's state beside the replicas': standbys that take over, snapshots, checkpoints, and going back to one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from dtfm.coordinator.log.wording import MOST_NAMED

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger

MOST_AGREED = 16
"""The number of steps whose agreed digests are remembered, the last ones."""


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """The file with one bucket's state. ``digest``: its BLAKE3 (hex); ``nonce``: what its name in a checkpoint has."""

    size_bytes: int
    digest: str
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """The state after ``step`` is on the nodes' own disks. ``parts`` are in order of bucket. ``holders``: by node, the
    buckets on its disk, as ranges [first, past_last). ``seconds``: since the commit of ``step``."""

    step: int
    parts: tuple[SnapshotPart, ...]
    holders: dict[str, tuple[tuple[int, int], ...]]
    seconds: float
    event: Literal["snapshot_written"] = "snapshot_written"

    def buckets_of(self, node: str) -> frozenset[int]:
        """Those that the node had on its disk when the snapshot was whole."""
        return frozenset(bucket for first, past in self.holders.get(node, ()) for bucket in range(first, past))

    def apply(self, ledger: Ledger) -> Ledger:
        return replace(ledger, copies=replace(ledger.copies, on_disks=self))

    def narrate(self) -> str:
        holders = [f"buckets {_numbers(ranges)} on {node}" for node, ranges in self.holders.items()]
        more = f"; on {len(holders) - MOST_NAMED} more nodes too" if len(holders) > MOST_NAMED else ""
        return f"snapshot of step {self.step} on disks in {self.seconds:.1f} s: {'; '.join(holders[:MOST_NAMED])}{more}"


@dataclass(frozen=True, slots=True)
class Copies:
    """Whole snapshots of the run's state."""

    checkpoints: Mapping[int, str] = field(default_factory=dict)
    """By step, the folders of whole checkpoints."""
    manifests: Mapping[int, str] = field(default_factory=dict)
    """By step, the BLAKE3 (hex) of their manifests."""
    agreed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By step, the digests of the state in its snapshots (see StateAgreed), the last MOST_AGREED."""
    on_disks: SnapshotWritten | None = None
    """The last whole snapshot on the nodes' disks."""

    @property
    def checkpoint_step(self) -> int:
        """The step of the newest whole checkpoint; 0: there is none."""
        return max(self.checkpoints, default=0)

    def back_to(self, step: int, folder: str) -> Copies:
        """Without what belongs to later steps. ``folder``: of the checkpoint of this step, if it has one."""
        checkpoints = {at: each for at, each in self.checkpoints.items() if at <= step}
        return Copies(
            checkpoints={**checkpoints, step: folder} if folder else checkpoints,
            manifests={at: digest for at, digest in self.manifests.items() if at <= step},
            agreed={at: digests for at, digests in self.agreed.items() if at <= step},
            on_disks=self.on_disks if self.on_disks and self.on_disks.step <= step else None,
        )


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """``manifest``: the BLAKE3 (hex) of its manifest."""

    step: int
    folder: str
    manifest: str = ""
    event: Literal["checkpoint_written"] = "checkpoint_written"

    def apply(self, ledger: Ledger) -> Ledger:
        copies = replace(
            ledger.copies,
            checkpoints={**ledger.copies.checkpoints, self.step: self.folder},
            manifests={**ledger.copies.manifests, self.step: self.manifest},
        )
        return replace(ledger, copies=copies)

    def narrate(self) -> str:
        return f"checkpoint of step {self.step}: {self.folder}"


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    step: int
    reason: str
    event: Literal["checkpoint_failed"] = "checkpoint_failed"

    def apply(self, ledger: Ledger) -> Ledger:
        return ledger

    def narrate(self) -> str:
        return f"no checkpoint of step {self.step}: {self.reason}"


@dataclass(frozen=True, slots=True)
class StandbyPromoted:
    """A standby counts as a holder of ``layers`` [first, past_last): no replica of them is left, and its copy is as of
    ``step``."""

    node: str
    incarnation: str
    layers: tuple[int, int]
    step: int
    event: Literal["standby_promoted"] = "standby_promoted"

    def apply(self, ledger: Ledger) -> Ledger:
        assert self.step == ledger.training.step
        process = (self.node, self.incarnation)
        return replace(ledger, training=ledger.training.with_holder(process, range(*self.layers)))

    def narrate(self) -> str:
        layers = f"{self.layers[0]}-{self.layers[1] - 1}"
        return f"standby {self.node} takes over the state of layers {layers} as of step {self.step}"


@dataclass(frozen=True, slots=True)
class StateAgreed:
    """All who trained the state after ``step``, of which there is a snapshot or may soon be one, agree on its digests (hex, by
    bucket; empty where it is not known)."""

    step: int
    digests: tuple[str, ...]
    event: Literal["state_agreed"] = "state_agreed"

    def apply(self, ledger: Ledger) -> Ledger:
        agreed = dict(sorted({**ledger.copies.agreed, self.step: self.digests}.items())[-MOST_AGREED:])
        return replace(ledger, copies=replace(ledger.copies, agreed=agreed))

    def narrate(self) -> str:
        return f"the digests of the state after step {self.step} are agreed on"


@dataclass(frozen=True, slots=True)
class RolledBack:
    """No node holds some stage's state any more: training goes back from ``from_step`` to ``step``. ``folder`` is the checkpoint
    of that step; empty at step 0, and if the snapshot is on the nodes' disks."""

    step: int
    from_step: int
    folder: str
    reason: str
    event: Literal["rolled_back"] = "rolled_back"

    def apply(self, ledger: Ledger) -> Ledger:
        return replace(
            ledger,
            training=ledger.training.back_to(self.step),
            copies=ledger.copies.back_to(self.step, self.folder),
            trust=ledger.trust.back_to(self.step),
        )

    def narrate(self) -> str:
        return f"back from step {self.from_step} to step {self.step}: {self.reason}"


def _numbers(ranges: Iterable[tuple[int, int]]) -> str:
    """The ranges with their last numbers included, like "0-4, 7"."""
    return ", ".join(f"{first}-{past - 1}" if past - first > 1 else str(first) for first, past in ranges)

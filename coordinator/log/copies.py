"""Copies of the run's state beside the replicas' memory: standbys that take over, snapshots, checkpoints, and going back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from dtfm.coordinator.log.wording import MOST_NAMED, Remark, seconds_in_words

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger

MOST_AGREED = 16
"""The number of steps whose agreed digests are remembered: the last ones."""


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """The file with one bucket's state. ``digest``: its BLAKE3 (hex)."""

    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A file with one bucket in a checkpoint. ``digest``: its BLAKE3 (hex). ``nonce``: a part of its name. ``moments``: if the
    file has only weights, the BLAKE3s of the rest of the state in a row (hex). Together with the weights' digest they make up the
    state's digest."""

    size_bytes: int
    digest: str
    nonce: str
    moments: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """The state after ``step`` is on the nodes' own disks. ``parts`` are in order of bucket. ``holders``: by node, the
    buckets on its disk, as ranges [first, past_last). ``seconds``: since the commit of ``step``. ``spread``: each part is on two
    machines, or cannot be."""

    step: int
    parts: tuple[SnapshotPart, ...]
    holders: dict[str, tuple[tuple[int, int], ...]]
    seconds: float
    spread: bool = True
    event: Literal["snapshot_written"] = "snapshot_written"

    def buckets_of(self, node: str) -> frozenset[int]:
        """The buckets that the node had on its disk when the snapshot became whole."""
        return frozenset(bucket for first, past in self.holders.get(node, ()) for bucket in range(first, past))

    def apply(self, ledger: Ledger) -> Ledger:
        older = [each for each in ledger.copies.on_disks.values() if each.spread and not self.spread]
        on_disks = {each.step: each for each in (*older, self)}
        return replace(ledger, copies=replace(ledger.copies, on_disks=on_disks))

    def narrate(self) -> str:
        holders = [f"buckets {_numbers(ranges)} on {node}" for node, ranges in self.holders.items()]
        more = f"; on {len(holders) - MOST_NAMED} more nodes too" if len(holders) > MOST_NAMED else ""
        took = seconds_in_words(self.seconds)
        return f"snapshot of step {self.step} on disks in {took}: {'; '.join(holders[:MOST_NAMED])}{more}"


@dataclass(frozen=True, slots=True)
class Copies:
    """Whole snapshots of the run's state."""

    checkpoints: Mapping[int, CheckpointWritten] = field(default_factory=dict)
    """By step, the whole checkpoints that the run keeps, the oldest first."""
    agreed: Mapping[int, StateAgreed] = field(default_factory=dict)
    """By step, the agreed digests of the state in its snapshots. Remembered for kept snapshots, and for the MOST_AGREED last
    steps, which may soon have a snapshot."""
    on_disks: Mapping[int, SnapshotWritten] = field(default_factory=dict)
    """By step, the whole snapshots on the nodes' disks: the last one, and the last one that was spread over machines."""
    from_weights: int = 0
    """The step whose weights, without moments, an operator last went back to. Later steps follow from these weights, with
    moments of zero. 0: the run has not gone back to weights."""

    @property
    def checkpoint_step(self) -> int:
        """The step of the newest whole checkpoint; 0: none."""
        return max(self.checkpoints, default=0)

    @property
    def resumable_step(self) -> int:
        """The step of the newest checkpoint that training can resume from; 0: none."""
        return max((step for step, each in self.checkpoints.items() if self.may_go_on_from(each)), default=0)

    def may_go_on_from(self, checkpoint: CheckpointWritten) -> bool:
        """Whether the checkpoint has all state that later steps were trained from."""
        return not checkpoint.weights or checkpoint.step == self.from_weights

    def is_safe(self, step: int) -> bool:
        """Whether the run may end after ``step``: its weights are in a checkpoint, and training could go on from a snapshot."""
        on_disks = step in self.on_disks and self.on_disks[step].spread
        return step in self.checkpoints and (on_disks or self.may_go_on_from(self.checkpoints[step]))

    def digests(self, step: int) -> tuple[str, ...]:
        """The digests of the state after ``step``, as in StateAgreed; empty: not known."""
        return self.agreed[step].digests if step in self.agreed else ()

    def with_agreed(self, agreed: Mapping[int, StateAgreed]) -> Copies:
        """The copies with the ``agreed`` digests that are still remembered."""
        kept = {*sorted(agreed)[-MOST_AGREED:], *self.checkpoints, *self.on_disks}
        return replace(self, agreed={step: agreed[step] for step in sorted(kept & agreed.keys())})

    def without_others(self, step: int, island: int) -> Copies:
        """Drops the digests of the state after ``step`` if another island is to write its checkpoint."""
        whole = step in self.checkpoints
        return replace(
            self, agreed={at: e for at, e in self.agreed.items() if at != step or whole or e.island == island}
        )

    def back_to(self, step: int) -> Copies:
        """The copies without later steps."""
        return Copies(
            checkpoints={at: each for at, each in self.checkpoints.items() if at <= step},
            agreed={at: each for at, each in self.agreed.items() if at <= step},
            on_disks={at: each for at, each in self.on_disks.items() if at <= step},
            from_weights=self.from_weights if self.from_weights <= step else 0,
        )

    def with_weights_of(self, step: int) -> Copies:
        """The copies when training resumes from the weights of ``step``: other copies of its state no longer count."""
        agreed = {at: each for at, each in self.agreed.items() if at != step}
        on_disks = {at: each for at, each in self.on_disks.items() if at != step}
        return replace(self, agreed=agreed, on_disks=on_disks, from_weights=step)


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """``manifest``: the BLAKE3 (hex) of its manifest. ``weights``: the checkpoint lacks the optimizer's state."""

    step: int
    folder: str
    manifest: str
    weights: bool = False
    event: Literal["checkpoint_written"] = "checkpoint_written"

    def apply(self, ledger: Ledger) -> Ledger:
        copies = ledger.copies
        kept = sorted({**copies.checkpoints, self.step: self}.items())[-ledger.keeps_checkpoints :]
        return replace(ledger, copies=replace(copies, checkpoints=dict(kept)).with_agreed(copies.agreed))

    def narrate(self) -> str:
        return f"{'weights' if self.weights else 'checkpoint'} of step {self.step}: {self.folder}"


@dataclass(frozen=True, slots=True)
class CheckpointFailed(Remark):
    step: int
    reason: str
    event: Literal["checkpoint_failed"] = "checkpoint_failed"

    def narrate(self) -> str:
        return f"no checkpoint of step {self.step}: {self.reason}"


@dataclass(frozen=True, slots=True)
class DiskShort(Remark):
    """A disk has ``free`` bytes, and may need ``needed``. ``nodes``: the node or nodes that share the disk; empty: it is the
    coordinator's."""

    nodes: str
    free: int
    needed: int
    event: Literal["disk_short"] = "disk_short"

    def narrate(self) -> str:
        whose = f"the disk of {self.nodes}" if self.nodes else "the coordinator's disk"
        what = "snapshots of its part" if self.nodes else "the run's checkpoints"
        fix = "name another with join --snapshots DIR" if self.nodes else "lower checkpoint.keep, or name another place"
        free, needed = (f"{size / 2**30:.1f} GiB" for size in (self.free, self.needed))
        return f"{whose} has {free} free, and {what} may come to need {needed}: make room there, or {fix}"


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
        process, layers = (self.node, self.incarnation), range(*self.layers)
        held = tuple(
            holders if process in holders or layer not in layers else (*holders, process)
            for layer, holders in enumerate(ledger.training.held)
        )
        islands = ledger.training.islands and {**ledger.training.islands, self.node: ledger.whole_island}
        return replace(ledger, training=replace(ledger.training, held=held, islands=islands))

    def narrate(self) -> str:
        layers = f"{self.layers[0]}-{self.layers[1] - 1}"
        return f"standby {self.node} takes over the state of layers {layers} as of step {self.step}"


@dataclass(frozen=True, slots=True)
class StateAgreed:
    """All nodes that trained the state after ``step`` agree on its digests (hex, by bucket; empty: not known). A snapshot of the
    step exists, or may exist soon. The state is of this ``island``, which ``began`` with moments of zero after that step."""

    step: int
    digests: tuple[str, ...]
    island: int = 0
    began: int = 0
    event: Literal["state_agreed"] = "state_agreed"

    def apply(self, ledger: Ledger) -> Ledger:
        agreed = {**ledger.copies.agreed, self.step: self}
        return replace(ledger, copies=ledger.copies.with_agreed(agreed))

    def narrate(self) -> str:
        return f"the digests of the state after step {self.step} are agreed on"


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Training goes back from ``from_step`` to ``step``. Nobody holds some stage's state, or the state is in doubt, or an
    operator asked for it. ``exchanges`` and ``ahead``: see Training.back_to. ``weights``: only weights are restored, and moments
    begin at zero."""

    step: int
    from_step: int
    reason: str
    exchanges: int = 0
    weights: bool = False
    ahead: int = 0
    event: Literal["rolled_back"] = "rolled_back"

    def apply(self, ledger: Ledger) -> Ledger:
        copies = ledger.copies.back_to(self.step)
        return replace(
            ledger,
            training=ledger.training.back_to(self.step, self.exchanges, self.ahead),
            copies=copies.with_weights_of(self.step) if self.weights else copies,
            losses=ledger.losses.back_to(self.step),
            trust=ledger.trust.back_to(self.step),
        )

    def narrate(self) -> str:
        return f"back from step {self.from_step} to step {self.step}: {self.reason}"


def _numbers(ranges: Iterable[tuple[int, int]]) -> str:
    """The ranges with their last numbers included, like "0-4, 7"."""
    return ", ".join(f"{first}-{past - 1}" if past - first > 1 else str(first) for first, past in ranges)

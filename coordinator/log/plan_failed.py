"""A plan that a node could not take up, and a snapshot that nodes find damaged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger


@dataclass(frozen=True, slots=True)
class PlanFailed:
    """A node could not take its part."""

    generation: int
    """The plan's generation."""
    node: str
    """The node."""
    reason: str
    """Why the node could not."""
    snapshot_damaged: bool = False
    """Whether a part of the snapshot is damaged on every disk that has it."""
    lost: tuple[int, ...] = ()
    """The layers whose state the node was expected to hold, and does not hold."""
    silent: bool = False
    """Whether the node did not report this, but was waited for in vain."""
    from_checkpoint: bool = False
    """Whether the damage is in the checkpoint, or another checkpoint is in its place."""
    event: Literal["plan_failed"] = "plan_failed"

    def apply(self, ledger: Ledger) -> Ledger:
        if self.snapshot_damaged:
            return _but_damaged(ledger, self.node, from_checkpoint=self.from_checkpoint)
        return replace(ledger, training=ledger.training.without_holders([self.node], self.lost))

    def narrate(self) -> str:
        return f"plan {self.generation} failed on {self.node}: {self.reason}"


def _but_damaged(ledger: Ledger, node: str, *, from_checkpoint: bool) -> Ledger:
    """The ledger after ``node`` reports that the snapshot is damaged.

    The snapshot is given up when two parties have said so: the memory of the first may be damaged, or it may lie. If a party is
    alone, it has to say so twice, and for a checkpoint, which all nodes read, with two of its nodes. The only checkpoint is not
    given up."""
    trust, copies, step = ledger.trust, ledger.copies, ledger.training.step
    said = dict.fromkeys((*trust.damaged_by, node))
    several = ledger.is_alone or len({ledger.party(name) for name in said}) > 1
    noted = replace(ledger, trust=replace(trust, damaged_by=tuple(said)))
    if not trust.damaged_by or not several:
        return noted
    settled = replace(noted, trust=replace(trust, damaged_by=()))
    if step in copies.on_disks and not from_checkpoint:
        others_on_disks = {at: snapshot for at, snapshot in copies.on_disks.items() if at != step}
        return replace(settled, copies=replace(copies, on_disks=others_on_disks))
    others = {at: checkpoint for at, checkpoint in copies.checkpoints.items() if at != step}
    if ledger.state_is_held or not others or len(said) == 1:
        return noted
    return replace(settled, copies=replace(copies, checkpoints=others))

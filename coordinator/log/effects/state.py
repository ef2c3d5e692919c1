"""What events do to who has which state."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.effects.members import MOST_FAILURES
from dtfm.coordinator.log.ledger import (
    Ledger,
)


def but_damaged(ledger: Ledger, failed: ev.PlanFailed) -> Ledger:
    """Without the snapshot that is damaged, once two parties have said so: the memory of the first may be damaged itself, or it
    may lie. Where there is one party alone, it has to say so twice, and two of its nodes if it is a checkpoint, which all read.
    The only checkpoint is not given up."""
    if not failed.snapshot_damaged:
        return ledger

    said = {*ledger.damaged_by, failed.node}
    is_alone = len({ledger.party(node) for node in (*ledger.members, *said)}) == 1
    several = is_alone or len({ledger.party(node) for node in said}) > 1
    before, ledger = ledger.damaged_by, replace(ledger, damaged_by=(*ledger.damaged_by, failed.node)[-MOST_FAILURES:])
    if not before or not several:
        return ledger
    if ledger.on_disks is not None and ledger.on_disks.step == ledger.step:
        return replace(ledger, on_disks=None, damaged_by=())
    others = {step: folder for step, folder in ledger.checkpoints.items() if step != ledger.step}
    if ledger.state_is_held or not others or len(said) == 1:
        return ledger
    return replace(ledger, checkpoints=others, damaged_by=())


def but_lost(ledger: Ledger, failed: ev.PlanFailed) -> tuple[tuple[tuple[str, str], ...], ...]:
    return tuple(
        tuple(who for who in holders if who[0] != failed.node) if layer in failed.lost else holders
        for layer, holders in enumerate(ledger.held)
    )


def held_by_plan(ledger: Ledger) -> tuple[tuple[tuple[str, str], ...], ...]:
    assert ledger.plan is not None
    return tuple(
        tuple((node, ledger.members[node].incarnation) for node in stage.replicas)
        for stage in ledger.plan.stages
        for _ in range(*stage.layers)
    )

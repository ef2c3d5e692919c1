"""Stages of a plan that nobody can audit, and why. Only a node of another party that holds the same layers can repeat the
work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dtfm.coordinator.log.wording import Remark, name_first
from dtfm.protos.run_file.cluster_tables import Trust
from dtfm.scheduler.model.plan import Plan

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger

REMEDY = "nodes of other parties there could repeat its work"


def unaudited(plan: Plan, party: Callable[[str], str], *, again: bool) -> dict[str, str]:
    """By name of each stage that nobody can audit, its holders. ``again``: after each round, islands of one node can repeat each
    other's steps (Rounds.restarts)."""
    alone = [island.nodes[0] for island in plan.islands if len(island.nodes) == 1]
    islands_can = again and len(set(map(party, alone))) > 1
    found = {}
    for index, stage in enumerate(plan.stages):
        held_by = stage.replicas
        if len(set(map(party, held_by))) > 1 or (islands_can and held_by[0] in alone):
            continue
        why = "alone holds it" if len(held_by) == 1 else "hold it, all of one party"
        found[plan.name_of(index)] = f"{name_first(held_by)} {why}"
    return found


def cannot_be_audited(ledger: Ledger) -> dict[str, str]:
    """The stages of the plan in force that nobody can audit. Empty if nothing is audited, or nothing is planned."""
    plan, trust = ledger.training.plan, ledger.run.get("trust", {})
    if plan is None or not Trust.model_validate(trust).audits:
        return {}
    return unaudited(plan, ledger.party, again=plan.rounds.restarts)


def describe_unaudited(stages: Mapping[str, str]) -> str:
    """A sentence without a full stop; empty if all stages can be audited."""
    if not stages:
        return ""
    return f"nobody can audit {'; '.join(f'{name} ({why})' for name, why in sorted(stages.items()))}: {REMEDY}"


@dataclass(frozen=True, slots=True)
class StagesUnaudited(Remark):
    """Nobody can audit these ``stages`` of the adopted plan: by name, its holders. Logged when they change."""

    generation: int
    stages: dict[str, str]
    event: Literal["stages_unaudited"] = "stages_unaudited"

    def narrate(self) -> str:
        return f"plan {self.generation}: {describe_unaudited(self.stages) or 'all stages can be audited again'}"

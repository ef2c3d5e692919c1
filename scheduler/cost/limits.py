"""What a plan's seconds depend on: makes each resource in turn twice as good and leaves the others unchanged."""

from __future__ import annotations

import enum

import numpy as np

from dtfm.scheduler.cost.simulate import simulated
from dtfm.scheduler.model.problem import Draft, Problem, Records
from dtfm.scheduler.model.tables import Tables, tables


class Limit(enum.StrEnum):
    """``LINK`` is the activations and their gradients on links, and their latency; ``REDUCTION`` is the gradients of parameters;
    ``MEMORY`` is what makes nodes compute layers again, or hold few micro-batches in flight."""

    DEVICE = "device"
    LINK = "link"
    REDUCTION = "reduction"
    MEMORY = "memory"


def limits(problem: Problem, draft: Draft) -> dict[Limit, float]:
    """By resource, the seconds per step that the plan would save if the resource were twice as good, the largest first."""
    t = tables(problem)
    now = float(simulated(t, draft))
    saved = {limit: max(0.0, now - float(simulated(_better(t, limit), draft))) for limit in Limit}
    return dict(sorted(saved.items(), key=lambda item: -item[1]))


def _better(t: Tables, limit: Limit) -> Tables:
    match limit:
        case Limit.DEVICE:
            return t._replace(node=_times(t.node, 2.0, "flops"))
        case Limit.LINK:
            return t._replace(layer=_times(t.layer, 0.5, "activation"), link=_times(t.link, 0.5, "latency"))
        case Limit.REDUCTION:
            return t._replace(layer=_times(t.layer, 0.5, "gradients_before"))
        case Limit.MEMORY:
            return t._replace(node=_times(t.node, 2.0, "memory", "host_memory"))


def _times(records: Records, factor: float, *fields: str) -> Records:
    changed: Records = np.copy(records)
    for field in fields:
        changed[field] *= factor
    return changed

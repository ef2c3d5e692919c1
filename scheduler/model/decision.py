"""The scheduler's answer: a plan, its predicted cost, and the reason for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.population import Population

HORIZON_SECONDS = 1800.0
"""Default seconds that a plan is expected to last before a node joins or leaves."""


class Objective(StrEnum):
    """What a plan is to minimize."""

    STEP = "step"
    """The seconds that a step takes, simulated, with any stages."""
    PAPER = "paper"
    """The cost model of arXiv 2206.01288, section 3, for equal groups."""


class Reason(StrEnum):
    """Why this plan and no other."""

    FIRST = "first"
    """There was no plan before."""
    NODE_LOST = "node_lost"
    """The incumbent used a node that has left."""
    REQUESTED = "requested"
    """The incumbent does not have the requested stages, or is for another workload."""
    INFEASIBLE = "infeasible"
    """The incumbent no longer works: a link is gone, or memory no longer suffices."""
    NOT_PROVEN = "not_proven"
    """A stage of the incumbent has no proven node, and proven nodes are as many as stages."""
    FASTER = "faster"
    """The new plan saves more time than the transfer of state costs."""
    KEPT = "kept"
    """No other plan is better by enough: the incumbent stays, with its generation."""


@dataclass(frozen=True, slots=True)
class PaperSeconds:
    """The paper's cost of a step, in seconds: ``data_parallel`` of the slowest group, ``pipeline`` summed over the boundaries
    between stages."""

    data_parallel: float
    pipeline: float

    @property
    def total(self) -> float:
        return self.data_parallel + self.pipeline


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted costs in seconds. ``exchange_seconds``: of an exchange between islands. ``paper``: by the paper's cost model,
    for a plan with the paper's objective."""

    iteration_seconds: float
    migration_seconds: float
    exchange_seconds: float = 0.0
    paper: PaperSeconds | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan and why it was chosen.

    ``lower_bound_seconds`` is a certified lower bound on the seconds per step, over all plans. ``sentence`` is the reason for
    people. ``population`` is the search's last one: the next search may start there.
    """

    plan: Plan
    predicted: Predicted
    lower_bound_seconds: float
    reason: Reason
    sentence: str
    evaluations: int
    population: Population = ()


class Infeasible(ValueError):
    """No plan fits. The message names the smallest shortfall that was found."""

"""What planning answers, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dtfm.scheduler.model.plan import Plan


class Objective(StrEnum):
    ITERATION = "iteration"
    """Seconds per step of what nodes really do."""
    PAPER = "paper"
    """The cost model of arXiv 2206.01288, on the workload's ``paper`` costs."""


class Reason(StrEnum):
    FIRST = "first"
    """There was no plan."""
    NODE_LOST = "node_lost"
    """The plan used a node that is gone."""
    REQUESTED = "requested"
    """The plan does not have the stages asked for, or is for another workload."""
    INFEASIBLE = "infeasible"
    """The plan no longer works: a link or memory that it needs is gone."""
    FASTER = "faster"
    """Another plan is faster by more than moving costs."""
    KEPT = "kept"
    """No other plan is better by enough: the incumbent stays, with its generation."""


@dataclass(frozen=True, slots=True)
class PaperSeconds:
    """What the paper's model predicts for one step."""

    data_parallel: float
    pipeline: float

    @property
    def total(self) -> float:
        return self.data_parallel + self.pipeline


class Why(StrEnum):
    JOINS = "joins"
    """The node held nothing."""
    WIDENS = "widens"
    """It keeps layers that it has and takes further ones."""
    MOVES = "moves"
    """It changes to layers of which it has none."""


@dataclass(frozen=True, slots=True)
class StateTransfer:
    """A node that gets the state of ``layers``, which it does not hold yet: weights and optimizer state."""

    node: str
    layers: tuple[int, ...]
    bytes: float
    why: Why


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds. ``paper`` only where the workload has ``paper`` costs of the plan's shape."""

    iteration_seconds: float
    paper: PaperSeconds | None
    migration_seconds: float


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan, what it is predicted to cost, what no plan can undercut in the objective's terms, and why this one.

    ``transfers``: who must fetch state that it did not hold under the incumbent.
    """

    plan: Plan
    predicted: Predicted
    lower_bound_seconds: float
    reason: Reason
    sentence: str
    evaluations: int
    transfers: tuple[StateTransfer, ...] = ()


class Infeasible(ValueError):
    """No plan fits; the message names the smallest shortfall that was found."""

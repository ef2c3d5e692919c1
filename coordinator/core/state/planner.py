"""What the planner is asked, what it answers, and the plan that waits to be adopted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dtfm.scheduler.model.plan import Plan


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the planner: the best plan for ``nodes`` (each with its process). The measurements are those after
    ``changes`` surprises (Ledger.changes). ``shown``: what each node has shown of itself (trust/claims.py). ``disputes``: the
    pairs in dispute (trust/disputes.py). ``steep``: islands may not begin yet (plan/steep_start.py)."""

    nodes: frozenset[tuple[str, str]]
    changes: int
    shown: frozenset[tuple[str, int]] = frozenset()
    disputes: frozenset[tuple[str, str]] = frozenset()
    steep: bool = False


@dataclass(frozen=True, slots=True)
class PlanChosen:
    """A plan to adopt. ``length``: of a round, as in the run file; None: the plan in force, or the rest of that plan.
    ``within_round``: it has the islands of the plan in force, and new ones, so that it need not wait for an exchange.
    ``with_moments``: if it begins within a round, new islands get the moments of islands that go on."""

    plan: Plan
    reason: str
    predicted_seconds: float | None = None
    lower_bound_seconds: float | None = None
    length: int | None = None
    within_round: bool = False
    with_moments: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that the planner is working on. ``hasty``: the planner takes the first good plan. ``tickets``: the callers that
    wait for the answer."""

    number: int
    question: Question
    hasty: bool
    tickets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The planner's answer: the best ``plan``, or None and the ``problem``. ``at``: the time of the answer."""

    question: Question
    hasty: bool
    plan: Plan | None
    problem: str = ""
    at: float = math.inf


@dataclass(frozen=True, slots=True)
class Planner:
    """``number`` is the last question's. ``chosen`` is a plan that waits to be adopted. ``has_planned``: this process has adopted
    a plan."""

    number: int = 0
    asked: Asked | None = None
    answer: Answer | None = None
    chosen: PlanChosen | None = None
    has_planned: bool = False

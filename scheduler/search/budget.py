"""How long to search, and the part of the time that walks may use up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

TimeUsed = Callable[[], float]
"""Returns the fraction of the time that is used up; the search ends at 1."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to search: until ``time_used`` gives 1, or for ``steps``. With neither, until another round is not worth it."""

    time_used: TimeUsed | None = None
    steps: int | None = None
    stopped: Callable[[], bool] = lambda: False
    """Whether to end now."""

    @property
    def limited(self) -> bool:
        return self.time_used is not None or self.steps is not None

    def late(self) -> bool:
        """Whether time is up."""
        return self.stopped() or (self.time_used is not None and self.time_used() >= 1)

    def over(self, spent: int) -> bool:
        """Whether nothing is left after ``spent`` evaluations."""
        return self.late() or (self.steps is not None and spent >= self.steps)

    def past(self, fraction: float, spent: int) -> bool:
        """Whether more than this fraction of the time is used up, or of the steps after ``spent`` evaluations."""
        late = self.time_used is not None and self.time_used() > fraction
        return late or self.over(int(spent / fraction))


@dataclass(frozen=True, slots=True)
class Purse:
    """The part of a budget for walks: the fraction ``walking`` of it, and at most ``steps`` from ``paid`` on."""

    budget: Budget
    walking: float
    steps: float
    paid: int

    def used(self, spent: int) -> float:
        """The fraction that is used up after ``spent`` steps in all."""
        if self.budget.stopped():
            return 1.0
        most = self.steps if self.budget.steps is None else min(self.steps, self.walking * self.budget.steps)
        by_steps = (spent - self.paid) / max(most, 1)
        return by_steps if self.budget.time_used is None else max(by_steps, self.budget.time_used() / self.walking)

    def part(self, until: float, spent: int, most: float = math.inf) -> Callable[[int], float]:
        """A function that tells, after a number of further steps, which fraction of a part is used up.

        The part begins now. It ends when the fraction ``until`` of the whole is used up, or after ``most`` steps.
        """
        since = self.used(spent)

        def used(taken: int) -> float:
            now = self.used(spent + taken)
            return 1.0 if now >= 1 else max(taken / most, (now - since) / max(until - since, 1e-9))

        return used

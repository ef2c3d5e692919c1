"""Rounds: several steps of every island, and an exchange. A pure function of a step's number, which coordinator and nodes
share.

An exchange is a step like others: voted on, committed everywhere or nowhere, and repeated if a node is lost before the commit.
But it trains nothing, and islands agree on one state (DiLoCo, arXiv 2311.08105).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rounds:
    """Which steps are exchanges: ``count`` of each ``steps`` after step ``since``, spread evenly, the last step included."""

    since: int = 0
    steps: int = 0
    count: int = 0
    """0: there are no rounds. Then every step trains, and all islands have the same weights after it."""
    before: int = 0
    """The number of exchanges up to ``since``."""
    restarts: bool = False
    """AdamW's moments are zero when a round begins. So every node knows the state at its beginning, and others can repeat the
    round."""

    def __post_init__(self) -> None:
        if self.count < 0 or 2 * self.count > self.steps or min(self.since, self.before) < 0:
            raise ValueError(f"{self.count} of {self.steps} steps are exchanges; at most half of them may be")

    @property
    def length(self) -> float:
        """The mean number of steps that train in a round; 0: there are no rounds."""
        return self.steps / self.count - 1 if self.count else 0.0

    def exchanges(self, step: int) -> bool:
        """Whether this step, after ``since``, is an exchange."""
        return step > self.since and self._number(step) > self._number(step - 1)

    def trained(self, step: int) -> int:
        """How many of the steps up to this one, at or after ``since``, train."""
        return step - self.before - self._number(step)

    def at_rest(self, step: int) -> bool:
        """Whether all islands have the same weights after this step: then the plan may change, and this state is the run's."""
        return not self.count or step == self.since or self.exchanges(step)

    def rested(self, step: int) -> int:
        """The last step, up to this one, whose end leaves all islands with the same weights."""
        return self._end(self._number(step)) if self.count else step

    def next_rest(self, step: int) -> int:
        """The first step after this one whose end leaves all islands with the same weights."""
        return self._end(self._number(step) + 1) if self.count else step + 1

    def is_due(self, step: int, every: int) -> bool:
        """Whether something that happens once in ``every`` steps (0: never) is due after this step. All islands have the same
        weights after it."""
        return every > 0 and step // every > self.rested(max(step - 1, self.since)) // every

    def _number(self, step: int) -> int:
        """The number of exchanges after ``since`` and up to ``step``."""
        return (step - self.since) * self.count // self.steps if self.count else 0

    def _end(self, number: int) -> int:
        """The step with the exchange of that number."""
        return self.since - -number * self.steps // self.count


def spread(length: int, steps: int, since: int = 0, before: int = 0, *, restarts: bool = False) -> Rounds:
    """Rounds of about ``length`` steps that train (0: no rounds), for the ``steps`` after ``since``, or two; the last step is
    an exchange.

    ``restarts``: others may repeat these rounds. Such rounds have at most MEASURED[-1] steps: in longer ones honest devices
    differ by too much.
    """
    steps = max(2, steps) if length else 0
    least = -(-steps // (MEASURED[-1] + 1)) if restarts else 1
    return Rounds(
        since, steps, min(max(1, least, round(steps / (length + 1))), steps // 2), before, restarts and length > 0
    )


def mean_seconds(length: int, step: float, exchange: float) -> float:
    """The mean seconds of all steps, exchanges among them. A step that trains takes ``step`` seconds. ``length``: of a round."""
    return (length * step + exchange) / (length + 1) if length else step


MEASURED = 10, 30, 100
"""The lengths for which docs/measurements.md says how many more tokens islands need."""


def lengths_within(steps: int, *, audited: bool) -> tuple[int, ...]:
    """The lengths of MEASURED that are shorter than ``steps``. Where work is ``audited``, the longest alone: each round then
    begins with moments of zero, and this costs an island more in short rounds."""
    return tuple(length for length in (MEASURED[-1:] if audited else MEASURED) if length < steps)


NO_ROUNDS = Rounds()
"""Every step trains, and exchanges gradients."""

"""Rounds: several steps of every island, and an exchange. A pure function of a step's number, which coordinator and nodes
share.

An exchange is a step like others: voted on, committed everywhere or nowhere, and repeated if a node is lost before the commit.
But it trains nothing, and islands agree on one state (DiLoCo, arXiv 2311.08105).
"""

from __future__ import annotations

from bisect import bisect_left
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
    batches_each: int = 1
    """The number of the run file's batches in each step that trains: more than one if the batch grows with the islands."""
    ahead: int = 0
    """How many batches more than steps were trained up to ``since``."""

    def __post_init__(self) -> None:
        if self.count < 0 or 2 * self.count > self.steps or min(self.since, self.before) < 0:
            raise ValueError(f"{self.count} of {self.steps} steps are exchanges; at most half of them may be")
        if self.batches_each < 1 or self.ahead < 0 or (self.batches_each > 1 and not self.count):
            raise ValueError(f"a step cannot have {self.batches_each} batches, after {self.ahead} more than steps")

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

    def batches(self, step: int) -> int:
        """How many of the run file's batches are trained up to this step, at or after ``since``. Samples follow from this."""
        trained = self.trained(step)
        return trained + self.ahead + (self.batches_each - 1) * (trained - self.trained(self.since))

    def progress(self, step: int) -> int:
        """How many of the run file's steps are done after this step: one for each batch, and one for each exchange."""
        return step + self.batches(step) - self.trained(step)

    def end(self, steps: int) -> int:
        """The last step of a run whose file has this number of ``steps``: the first one, after ``since``, that completes them.
        If they were complete before, a step up to ``since``."""
        left = steps - self.progress(self.since)
        if left <= 0 or self.batches_each == 1:
            return self.since + left
        return bisect_left(range(self.since, self.since + left), steps, key=self.progress) + self.since

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
        """Whether something that happens once in ``every`` steps of the run file (0: never) is due after this step. All islands
        have the same weights after it."""
        before = self.rested(max(step - 1, self.since))
        return every > 0 and self.progress(step) // every > self.progress(before) // every

    def _number(self, step: int) -> int:
        """The number of exchanges after ``since`` and up to ``step``."""
        return (step - self.since) * self.count // self.steps if self.count else 0

    def _end(self, number: int) -> int:
        """The step with the exchange of that number."""
        return self.since - -number * self.steps // self.count


def spread(
    length: int,
    steps: int,
    since: int = 0,
    before: int = 0,
    *,
    restarts: bool = False,
    batches_each: int = 1,
    ahead: int = 0,
) -> Rounds:
    """Rounds of about ``length`` steps that train (0: no rounds), for the ``steps`` after ``since``, or two; the last step is
    an exchange. If steps have several ``batches_each``, fewer steps do as much.

    ``restarts``: others may repeat these rounds. Such rounds have at most MEASURED[-1] steps: in longer ones honest devices
    differ by too much.
    """
    if not length:
        return Rounds(since, 0, 0, before, ahead=ahead)
    if batches_each > 1:
        steps = bisect_left(
            range(steps), steps, key=lambda n: n + (batches_each - 1) * (n - _exchanges(length, n, restarts))
        )
    steps = max(2, steps)
    return Rounds(since, steps, _exchanges(length, steps, restarts), before, restarts, batches_each, ahead)


def _exchanges(length: int, steps: int, restarts: bool) -> int:
    """How many of so many steps are exchanges."""
    least = -(-steps // (MEASURED[-1] + 1)) if restarts else 1
    return min(max(1, least, round(steps / (length + 1))), steps // 2)


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

"""Which micro-batches come again: a pure function of the plan, which coordinator and nodes share.

The micro-batches of a run are numbered from 0 in the order of its samples, and steps that train take them in order. When an
island is given up, its training since the last exchange is lost. Those micro-batches are owed: the next steps take them before
they go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Range = tuple[int, int]
"""Half-open."""


def total(ranges: Sequence[Range]) -> int:
    """The number of micro-batches in all of them."""
    return sum(past_last - first for first, past_last in ranges)


@dataclass(frozen=True, slots=True)
class Owed:
    """After the first ``since`` steps that train come the micro-batches ``again``, in ascending ranges. Then come the
    micro-batches from ``new`` on, which no step has taken."""

    since: int = 0
    again: tuple[Range, ...] = ()
    new: int = 0

    def __post_init__(self) -> None:
        borders = [border for each in self.again for border in each]
        if (
            min(self.since, *borders, self.new) < 0
            or borders != sorted({*borders})
            or self.new < max(borders, default=0)
        ):
            raise ValueError(f"{self.again} cannot be owed before micro-batch {self.new}")

    def taken(self, trained: int, places: range, of_step: int) -> Iterator[Range]:
        """The micro-batches at these ``places`` of a step's ``of_step`` micro-batches. The step is the one that trains as
        number ``trained``, which is above ``since``."""
        start = (trained - 1 - self.since) * of_step
        return self._between(start + places.start, start + places.stop)

    def left(self, trained: int, of_step: int) -> tuple[Range, ...]:
        """The part of ``again`` that the first ``trained`` steps have not taken."""
        return tuple(self._between((trained - self.since) * of_step, total(self.again)))

    def _between(self, start: int, stop: int) -> Iterator[Range]:
        """Of the micro-batches that steps after ``since`` take, counted from 0, the ones from ``start`` to ``stop``."""
        for first, past_last in (*self.again, (self.new, self.new + stop)):
            length = past_last - first
            if (begin := max(0, start)) < (end := min(stop, length)):
                yield first + begin, first + end
            start, stop = start - length, stop - length


NOTHING_OWED = Owed()

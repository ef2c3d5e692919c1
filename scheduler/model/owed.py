"""Which micro-batches come again: a pure function of the plan, which coordinator and nodes share.

The micro-batches of a run are numbered from 0 in the order of its samples, and steps that train take them in order: as many
batches of the run file as the plan's rounds say. When an
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
    """After the run's first ``since`` batches come the micro-batches ``again``, in ascending ranges. Then come the
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

    def taken(self, batches: int, places: range, of_batch: int) -> Iterator[Range]:
        """The micro-batches at these ``places`` of the step that follows ``batches`` batches, at least ``since``. A batch has
        ``of_batch`` micro-batches."""
        start = (batches - self.since) * of_batch
        return self._between(start + places.start, start + places.stop)

    def left(self, batches: int, of_batch: int) -> tuple[Range, ...]:
        """The part of ``again`` that the first ``batches`` batches have not taken."""
        return tuple(self._between((batches - self.since) * of_batch, total(self.again)))

    def _between(self, start: int, stop: int) -> Iterator[Range]:
        """Of the micro-batches that steps after ``since`` take, counted from 0, the ones from ``start`` to ``stop``."""
        for first, past_last in (*self.again, (self.new, self.new + stop)):
            length = past_last - first
            if (begin := max(0, start)) < (end := min(stop, length)):
                yield first + begin, first + end
            start, stop = start - length, stop - length


NOTHING_OWED = Owed()

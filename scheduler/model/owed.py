"""Which micro-batches come again: a pure function of the plan, which coordinator and nodes share.

The micro-batches of a run are numbered from 0 in the order of its samples, and steps that train take them in order. When an
island is given up, what it has trained since the last exchange is lost: it is owed, and the next steps take it before they go on.
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
    """After the first ``since`` steps that train come the micro-batches ``again``, in ascending ranges; then those from ``new``
    on, which nobody has had."""

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
        """The micro-batches at these ``places`` of the ``of_step`` in a step: the one with this number, above ``since``, of those
        that train."""
        start = (trained - 1 - self.since) * of_step
        return self._between(start + places.start, start + places.stop)

    def left(self, trained: int, of_step: int) -> tuple[Range, ...]:
        """Those ``again`` that the first ``trained`` steps have not taken."""
        return tuple(self._between((trained - self.since) * of_step, total(self.again)))

    def _between(self, start: int, stop: int) -> Iterator[Range]:
        """Of what steps after ``since`` take, that from ``start`` to ``stop``."""
        for first, past_last in (*self.again, (self.new, self.new + stop)):
            length = past_last - first
            if (begin := max(0, start)) < (end := min(stop, length)):
                yield first + begin, first + end
            start, stop = start - length, stop - length


NOTHING_OWED = Owed()

"""How long the run has worked on its steps, so that a loss can be told in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

MOST_MARKS = 64
"""When there are this many, every second of them is dropped."""


@dataclass(frozen=True, slots=True)
class Work:
    """The seconds that the committed steps took. Steps that were given up do not count."""

    marks: tuple[tuple[int, float], ...] = ((0, 0.0),)
    """Steps in order, each with the seconds that all steps up to it took. Older marks are further apart."""

    def with_step(self, step: int, seconds: float) -> Work:
        marks = (*self.marks, (step, self.marks[-1][1] + seconds))
        return Work(marks if len(marks) < MOST_MARKS else (*marks[:-1:2], marks[-1]))

    def until(self, step: int) -> float:
        """The seconds that the steps up to this step took. Between two marks all steps count as equally long."""
        for (before, less), (after, more) in pairwise(self.marks):
            if step < after:
                return less + (more - less) * max(0, step - before) / (after - before)
        return self.marks[-1][1]

    def between(self, step: int, later: int) -> float:
        """The seconds of the steps after ``step``, up to the ``later`` one."""
        return self.until(later) - self.until(step)

    def back_to(self, step: int) -> Work:
        return Work((*(mark for mark in self.marks if mark[0] < step), (step, self.until(step))))

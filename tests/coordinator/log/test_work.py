"""The seconds that steps took: `log/work.py`."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dtfm.coordinator.log.work import MOST_MARKS, Work


def after(*seconds: float) -> Work:
    work = Work()
    for step, each in enumerate(seconds, 1):
        work = work.with_step(step, each)
    return work


def test_the_loss_is_the_time_of_the_steps_since() -> None:
    work = after(2.0, 3.0, 5.0)
    assert [work.between(step, 3) for step in range(4)] == [10.0, 8.0, 5.0, 0.0]
    assert work.between(0, 2) == 5.0


def test_after_going_back_the_steps_that_are_trained_again_count_once_more() -> None:
    work = after(2.0, 3.0, 5.0).back_to(1).with_step(2, 7.0)
    assert (work.until(1), work.until(2)) == (2.0, 9.0)


def test_a_log_that_begins_with_a_checkpoint_counts_from_there() -> None:
    work = Work().back_to(100).with_step(101, 4.0)
    assert work.between(0, 101) == work.between(100, 101) == 4.0


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=1000), st.data())
def test_of_many_steps_few_marks_are_kept_and_the_newest_are_the_closest(
    seconds: list[float], data: st.DataObject
) -> None:
    work, step = after(*seconds), data.draw(st.integers(0, len(seconds)))
    assert len(work.marks) <= MOST_MARKS
    assert work.until(len(seconds)) == pytest.approx(sum(seconds))
    exact = sum(seconds[step:])
    apart = max(after - before for (before, _), (after, _) in zip(work.marks, work.marks[1:], strict=False))
    assert work.between(step, len(seconds)) == pytest.approx(exact, abs=10.0 * apart)

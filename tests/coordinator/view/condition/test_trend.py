"""When a loss rises, and when it is only noise."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest

from dtfm.coordinator.view.condition.trend import HeldOut, Trend


def rises(losses: Iterable[float]) -> list[int]:
    """After which steps the loss was said to rise."""
    trend, found = Trend(), []
    for step, loss in enumerate(losses, start=1):
        trend = trend.after(step, loss)
        if trend.rises_since is not None:
            found.append(step)
    return found


def falling(step: int) -> float:
    return 3 + 7 * math.exp(-step / 100)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.3])
def test_a_loss_that_falls_or_is_level_never_rises_however_noisy(noise: float, seed: int) -> None:
    draw = random.Random(seed)
    assert rises(falling(step) + draw.gauss(0, noise) for step in range(1, 3000)) == []
    assert rises(2 + draw.gauss(0, noise) for _ in range(1, 3000)) == []


def test_a_loss_that_rises_is_seen_within_some_steps() -> None:
    draw = random.Random(0)
    losses = [falling(step) + draw.gauss(0, 0.1) + max(0, step - 900) * 0.05 for step in range(1, 1000)]
    found = rises(losses)
    assert 900 < found[0] < 930
    assert found[-1] == 999


def test_the_trend_in_a_word() -> None:
    trend, words = Trend(), list[str]()
    losses = [*(10 - step * 0.01 for step in range(100)), *[9.0] * 60, *(9 + step * 0.1 for step in range(40))]
    for step, loss in enumerate(losses, start=1):
        trend = trend.after(step, loss)
        if not words or words[-1] != trend.word:
            words.append(trend.word)
    assert [word for word in words if word] == ["falling", "rising"], words
    draw, trend = random.Random(1), Trend()
    for step in range(1, 2000):
        trend = trend.after(step, 2 + draw.gauss(0, 0.1))
    assert trend.word == "level"


def test_one_step_far_off_or_without_a_loss_is_no_rise() -> None:
    draw = random.Random(0)
    losses = [falling(step) + draw.gauss(0, 0.1) for step in range(1, 1000)]
    for odd in (40.0, math.nan, math.inf):
        assert rises([*losses[:700], odd, *losses[700:]]) == []


def test_the_held_out_loss_rises_after_two_evaluations_above_the_lowest() -> None:
    told, found = HeldOut(), []
    for step, loss in ((50, 5.0), (100, 4.0), (150, 4.1), (200, 4.01), (250, 4.2), (300, 3.9), (350, math.nan)):
        told = told.after(step, loss)
        found.append(told.rises_since)
    assert found == [None, None, None, None, 100, None, None]

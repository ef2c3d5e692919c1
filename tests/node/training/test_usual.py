"""A moving average that nobody can lead far in a few steps."""

from __future__ import annotations

import math
import random

from hypothesis import given, strategies as st

from dtfm.node.training.usual import CLAMPED, KNOWN_AFTER, MOST_DEVIATIONS, NEW_SHARE, Usual

ANYTHING = st.floats()
LEAST, MOST = 0.25, 0.6


def after(*values: float) -> Usual:
    usual = Usual(LEAST, MOST)
    for value in values:
        usual = usual.moved(value)
    return usual


@given(st.integers(0, 10_000), st.floats(-50, 50), st.floats(0.01, 0.6))
def test_numbers_that_go_on_as_they_were_are_usual(seed: int, mean: float, spread: float) -> None:
    chance, usual = random.Random(seed), Usual(LEAST, MOST)
    for _ in range(200):
        value = chance.gauss(mean, spread)
        assert not usual.is_known or usual.deviations(value) < 8
        usual = usual.moved(value)


@given(st.lists(st.floats(-1, 1), min_size=KNOWN_AFTER, max_size=50), st.sampled_from([-1, 1]))
def test_a_jump_is_not(values: list[float], way: int) -> None:
    assert after(*values).is_known
    assert after(*values).deviations(7 * way) >= 8


@given(st.lists(ANYTHING, max_size=40), ANYTHING)
def test_whatever_comes_the_answer_is_a_number_within_bounds(values: list[float], value: float) -> None:
    usual = after(*values)
    assert math.isfinite(usual.mean)
    assert LEAST <= usual.deviation <= MOST
    assert 0 <= usual.deviations(value) <= MOST_DEVIATIONS


@given(st.lists(st.floats(-1, 1), min_size=KNOWN_AFTER, max_size=30), st.lists(ANYTHING, max_size=20))
def test_nobody_leads_it_far_in_a_few_steps(values: list[float], wanted: list[float]) -> None:
    before = after(*values)
    led = before
    for value in wanted:
        led = led.moved(value)
    assert abs(led.mean - before.mean) <= len(wanted) * NEW_SHARE * CLAMPED * MOST + 1e-9


def test_numbers_that_were_all_the_same_do_not_make_a_near_one_unusual() -> None:
    assert after(*[1.0] * 100).deviations(1.1) < 1


def test_it_follows_what_changes_for_good() -> None:
    assert after(*[0.0] * 50, *[5.0] * 100).deviations(5.0) < 1

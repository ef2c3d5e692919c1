"""The part of a search's budget that its rounds of walks may use up."""

from __future__ import annotations

import math

import pytest

from dtfm.scheduler.search.budget import Budget, Purse


def purse(budget: Budget, steps: float = math.inf) -> Purse:
    return Purse(budget, walking=0.5, steps=steps, paid=100)


def test_walks_have_their_fraction_of_the_steps() -> None:
    mine = purse(Budget(steps=2_000))
    assert [mine.used(spent) for spent in (100, 600, 1_100)] == [0, 0.5, 1]


def test_and_of_the_time_and_what_is_used_up_first_counts() -> None:
    mine = purse(Budget(time_used=lambda: 0.2, steps=2_000))
    assert [mine.used(spent) for spent in (100, 300, 1_100)] == [0.4, 0.4, 1]


def test_a_part_begins_where_the_one_before_has_ended() -> None:
    used = purse(Budget(), steps=1_000).part(until=0.8, spent=500)
    assert [used(taken) for taken in (0, 100, 200, 400)] == pytest.approx([0, 0.25, 0.5, 1])


def test_a_part_has_at_most_its_steps() -> None:
    used = purse(Budget(), steps=1_000).part(until=0.8, spent=500, most=100)
    assert [used(taken) for taken in (0, 50, 100)] == [0, 0.5, 1]


def test_a_part_is_over_at_once_when_the_search_is_stopped() -> None:
    assert purse(Budget(steps=2_000, stopped=lambda: True)).part(until=0.8, spent=100)(0) == 1


def test_a_part_for_which_nothing_is_left_ends_with_its_first_step() -> None:
    assert purse(Budget(), steps=1_000).part(until=0.5, spent=600)(1) >= 1

"""How much islands count in an exchange: by what they have trained since the last."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, strategies as st

from dtfm.scheduler.model.counted import NOTHING_COUNTED, Counted
from dtfm.scheduler.model.rounds import Rounds, spread

LENGTH = 4
EVENLY = spread(LENGTH, 3 * (LENGTH + 1))


@given(shares=st.dictionaries(st.integers(0, 5), st.integers(1, 20), min_size=1), number=st.integers(1, 3))
def test_islands_that_train_all_steps_count_by_their_shares_of_a_step(shares: Mapping[int, int], number: int) -> None:
    """To the last bit."""
    weights = NOTHING_COUNTED.weights(EVENLY, shares, number * (LENGTH + 1))
    assert weights == {island: share / sum(shares.values()) for island, share in shares.items()}


def test_an_island_that_begins_within_a_round_counts_by_the_steps_that_it_trains() -> None:
    """Island 0 trains three steps of 4 micro-batches alone. Then both have 2."""
    counted = Counted(3, ((0, 12),))
    assert counted.weights(EVENLY, {0: 2, 1: 2}, 5) == {0: 14 / 16, 1: 2 / 16}


def test_what_was_trained_before_an_exchange_does_not_count_in_the_next() -> None:
    counted = Counted(3, ((0, 12),))
    assert counted.weights(EVENLY, {0: 2, 1: 2}, 10) == {0: 0.5, 1: 0.5}


def test_rounds_that_begin_later_count_from_there() -> None:
    rounds = Rounds(since=7, steps=10, count=2, before=1)
    assert rounds.exchanges(12)
    assert Counted(8, ((0, 8),)).weights(rounds, {0: 3, 1: 1}, 12) == {0: 14 / 16, 1: 2 / 16}


def test_where_nobody_has_trained_anything_all_count_by_their_shares() -> None:
    assert Counted(4, ()).weights(EVENLY, {0: 3, 1: 1}, 5) == {0: 0.75, 1: 0.25}


@pytest.mark.parametrize("had", [((1, 2), (0, 2)), ((0, 1), (0, 2)), ((0, -1),)])
def test_what_no_islands_can_have_trained_is_refused(had: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="cannot be what islands have trained"):
        Counted(3, had)

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dtfm.scheduler.model.rounds import MEASURED, NO_ROUNDS, Rounds, spread


@given(
    length=st.integers(2, 200), steps=st.integers(2, 3000), since=st.integers(0, 10**6), before=st.integers(0, 10**5)
)
def test_exchanges_are_spread_evenly_and_the_last_step_is_one(length: int, steps: int, since: int, before: int) -> None:
    rounds = spread(length, steps, since, before)
    every = range(since + 1, since + steps + 1)
    exchanges = [step for step in every if rounds.exchanges(step)]
    assert exchanges[-1] == since + steps
    assert len(exchanges) == rounds.count == max(1, min(round(steps / (length + 1)), steps // 2))
    apart = [later - step for step, later in zip([since, *exchanges], exchanges, strict=False)]
    assert min(apart) >= 2
    assert max(apart) - min(apart) <= 1
    trained, rested = since - before, since
    for step in every:
        assert rounds.next_rest(step - 1) == next(each for each in exchanges if each >= step)
        trained += step not in exchanges
        rested = step if step in exchanges else rested
        assert rounds.trained(step) == trained
        assert rounds.rested(step) == rested
        assert rounds.at_rest(step) == (step == rested)


@given(length=st.integers(2, 100), steps=st.integers(2, 3000))
def test_rounds_that_others_may_do_again_are_never_longer_than_was_measured(length: int, steps: int) -> None:
    rounds = spread(length, steps, restarts=True)
    assert rounds.restarts
    rests = [step for step in range(steps + 1) if rounds.at_rest(step)]
    assert max(later - step - 1 for step, later in pairwise(rests)) <= MEASURED[-1]


@given(every=st.integers(1, 300), rounds=st.builds(spread, st.integers(0, 40), st.integers(2, 1000)))
def test_an_event_of_every_few_steps_is_due_at_the_next_rest(every: int, rounds: Rounds) -> None:
    due = [step for step in range(1, 1001) if rounds.at_rest(step) and rounds.is_due(step, every)]
    assert due == sorted({at for n in range(every, 1001, every) if (at := rounds.next_rest(n - 1)) <= 1000})


def test_without_rounds_every_step_trains_and_the_run_is_always_at_rest() -> None:
    assert spread(0, 100) == NO_ROUNDS
    after = Rounds(since=40, before=3)
    for step in range(41, 50):
        assert after.at_rest(step)
        assert not after.exchanges(step)
        assert (after.trained(step), after.rested(step), after.next_rest(step)) == (step - 3, step, step + 1)


@pytest.mark.parametrize("of", [{"steps": 3, "count": 2}, {"count": 1}, {"steps": 9, "count": -1}])
def test_more_exchanges_than_steps_that_train_are_refused(of: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at most half of them may be"):
        Rounds(**of)

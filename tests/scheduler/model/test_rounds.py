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


GROWN: dict[str, Any] = {
    "length": st.integers(2, 60),
    "steps": st.integers(2, 2000),
    "since": st.integers(0, 100),
    "each": st.integers(1, 9),
    "ahead": st.integers(0, 50),
}


@given(**GROWN)
def test_with_several_batches_in_a_step_fewer_steps_do_the_run_files_steps(
    length: int, steps: int, since: int, each: int, ahead: int
) -> None:
    """An exchange is one of these steps, and each batch is one. The last step may have more batches than were left."""
    rounds = spread(length, steps, since, min(since, 3), batches_each=each, ahead=ahead)
    last = rounds.end(since + ahead + steps)
    assert rounds.progress(last) >= since + ahead + steps > rounds.progress(last - 1)
    assert rounds.exchanges(since + rounds.steps)
    assert last <= since + rounds.steps <= rounds.next_rest(last - 1)
    done, batches = since + ahead, rounds.batches(since)
    assert batches == since - min(since, 3) + ahead
    for step in range(since + 1, last + 1):
        batches += 0 if rounds.exchanges(step) else each
        done += 1 if rounds.exchanges(step) else each
        assert (rounds.batches(step), rounds.progress(step)) == (batches, done)


@given(**GROWN)
def test_rounds_that_follow_count_on_from_where_others_ended(
    length: int, steps: int, since: int, each: int, ahead: int
) -> None:
    rounds = spread(length, steps, since, batches_each=each, ahead=ahead)
    at = rounds.next_rest(since)
    after = spread(3, 40, at, at - rounds.trained(at), batches_each=2, ahead=rounds.progress(at) - at)
    ended = spread(0, 40, at, at - rounds.trained(at), ahead=rounds.progress(at) - at)
    for each_after in (after, ended):
        assert (each_after.batches(at), each_after.progress(at)) == (rounds.batches(at), rounds.progress(at))
    assert (ended.batches(at + 5), ended.end(ended.progress(at) + 5)) == (ended.batches(at) + 5, at + 5)


def test_an_event_of_every_few_steps_of_the_run_file_is_due_as_often_however_large_steps_are() -> None:
    rounds = spread(3, 130, batches_each=4)  # each round does 13 of the run file's steps
    rests = [step for step in range(1, rounds.steps + 1) if rounds.at_rest(step)]
    assert [rounds.progress(step) for step in rests if rounds.is_due(step, 26)] == [26, 52, 78, 104, 130]


def test_without_rounds_every_step_trains_and_the_run_is_always_at_rest() -> None:
    assert spread(0, 100) == NO_ROUNDS
    after = Rounds(since=40, before=3)
    for step in range(41, 50):
        assert after.at_rest(step)
        assert not after.exchanges(step)
        assert (after.trained(step), after.rested(step), after.next_rest(step)) == (step - 3, step, step + 1)


@pytest.mark.parametrize("of", [{"batches_each": 0, "steps": 9, "count": 1}, {"batches_each": 2}, {"ahead": -1}])
def test_a_step_has_whole_batches_and_only_rounds_have_several(of: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a step cannot have"):
        Rounds(**of)


@pytest.mark.parametrize("of", [{"steps": 3, "count": 2}, {"count": 1}, {"steps": 9, "count": -1}])
def test_more_exchanges_than_steps_that_train_are_refused(of: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at most half of them may be"):
        Rounds(**of)

"""Schedules of the learning rate: where each begins, what it does in between, and where it ends."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from dtfm.coordinator.core.step.commits import learning_rate
from dtfm.protos.plan_pb2 import CONSTANT, COSINE, LINEAR, WARMUP_STABLE_DECAY, Run, Schedule

FALLING = [COSINE, LINEAR, WARMUP_STABLE_DECAY]


@st.composite
def trains(draw: st.DrawFn, schedules: list[Schedule]) -> Run.Train:
    steps = draw(st.integers(1, 300))
    warmup = draw(st.integers(0, steps))
    return Run.Train(
        steps=steps,
        learning_rate=draw(st.floats(1e-6, 10)),
        warmup_steps=warmup,
        final_learning_rate_fraction=draw(st.floats(0, 1)),
        schedule=draw(st.sampled_from(schedules)),
        decay_steps=draw(st.integers(0, steps - warmup)),
    )


def rates(train: Run.Train) -> list[float]:
    return [learning_rate(train, step) for step in range(1, train.steps + 1)]


@given(trains([CONSTANT, *FALLING]))
def test_it_rises_by_equal_parts_then_never_again(train: Run.Train) -> None:
    all_rates = rates(train)
    warmup = all_rates[: train.warmup_steps]
    assert warmup == pytest.approx([train.learning_rate * n / max(len(warmup), 1) for n in range(1, len(warmup) + 1)])
    after = all_rates[max(train.warmup_steps - 1, 0) :]
    assert all(earlier >= later - 1e-12 * train.learning_rate for earlier, later in pairwise(after))
    assert max(all_rates) <= train.learning_rate * (1 + 1e-12)


@given(trains(FALLING))
def test_it_ends_at_the_final_fraction_unless_it_ends_with_the_warm_up(train: Run.Train) -> None:
    falls = train.decay_steps > 0 if train.schedule == WARMUP_STABLE_DECAY else train.warmup_steps < train.steps
    expected = train.learning_rate * (train.final_learning_rate_fraction if falls else 1)
    assert rates(train)[-1] == pytest.approx(expected)
    assert learning_rate(train, train.steps + 7) == pytest.approx(
        train.learning_rate * train.final_learning_rate_fraction
    )


@given(trains([CONSTANT]))
def test_a_constant_one_stays(train: Run.Train) -> None:
    assert set(rates(train)[train.warmup_steps :]) <= {train.learning_rate}


@given(trains([LINEAR, WARMUP_STABLE_DECAY]))
def test_a_line_falls_by_equal_parts(train: Run.Train) -> None:
    first = train.warmup_steps if train.schedule == LINEAR else train.steps - train.decay_steps
    falling = [learning_rate(train, step) for step in range(max(first, 1), train.steps + 1)]
    drops = [earlier - later for earlier, later in pairwise(falling)]
    assert drops == pytest.approx(drops[:1] * len(drops), rel=1e-6, abs=1e-9 * train.learning_rate)


@given(trains([WARMUP_STABLE_DECAY]))
def test_between_warm_up_and_decay_it_is_stable(train: Run.Train) -> None:
    stable = rates(train)[train.warmup_steps : train.steps - train.decay_steps]
    assert stable == pytest.approx([train.learning_rate] * len(stable))


def test_a_cosine_is_half_way_in_the_middle() -> None:
    train = Run.Train(steps=100, learning_rate=3e-3, warmup_steps=10, final_learning_rate_fraction=0.1)
    assert train.schedule == COSINE
    assert [learning_rate(train, step) for step in (1, 10, 55, 100)] == pytest.approx([3e-4, 3e-3, 1.65e-3, 3e-4])

"""Which samples a step takes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from dtfm.node.data.samples import evaluation_samples, held_out, training_samples

sizes = st.tuples(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 60)
)  # micro_batch, micro-batches per step, samples


def taken(seed: int, steps: range, micro_batch: int, micro_batches: int, count: int) -> list[int]:
    return [
        int(index)
        for number in range((steps.start - 1) * micro_batches, (steps.stop - 1) * micro_batches)
        for index in training_samples(seed, number, micro_batch=micro_batch, count=count)
    ]


@given(seed=st.integers(0, 2**64 - 1), size=sizes)
def test_every_sample_comes_once_per_epoch(seed: int, size: tuple[int, int, int]) -> None:
    micro_batch, micro_batches, count = size
    epochs = 3
    order = taken(
        seed, range(1, epochs * count // (micro_batch * micro_batches) + 2), micro_batch, micro_batches, count
    )
    for epoch in range(epochs):
        assert sorted(order[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_the_way_a_step_is_cut_into_micro_batches_does_not_change_its_samples() -> None:
    assert taken(3, range(1, 9), 2, 6, 31) == taken(3, range(1, 9), 3, 4, 31) == taken(3, range(1, 9), 12, 1, 31)


def test_the_order_changes_with_the_seed_and_the_epoch() -> None:
    first, second = np.array(taken(1, range(1, 3), 10, 10, 100)).reshape(2, 100)
    assert first.tolist() != second.tolist() != list(range(100))
    assert first.tolist() != taken(2, range(1, 2), 10, 10, 100)


def test_the_order_is_the_same_everywhere() -> None:
    # Written down once: another NumPy, another machine must draw the same.
    assert taken(1, range(1, 2), 5, 2, 10) == [3, 5, 2, 9, 7, 0, 8, 6, 1, 4]


def test_evaluation_takes_every_held_out_sample_before_any_again() -> None:
    numbers = np.concatenate([evaluation_samples(n, micro_batch=4, count=10) for n in range(5)])
    assert sorted(numbers[:10]) == list(range(10))
    assert numbers[10:].tolist() == numbers[:10].tolist()


@given(count=st.integers(2, 2000), fraction=st.floats(1e-6, 1, exclude_max=True))
def test_every_sample_is_either_trained_on_or_held_out(count: int, fraction: float) -> None:
    training, evaluation = held_out(count, fraction)
    assert sorted([*training, *evaluation]) == list(range(count))
    assert len(evaluation) == min(max(int(count * fraction), 1), count - 1)


def test_no_order_in_the_data_shows_in_what_is_held_out() -> None:
    _, evaluation = held_out(40_000, 0.1)
    assert np.abs(np.bincount(evaluation % 10) - 400).max() < 100
    assert np.abs(np.bincount(evaluation // 4000) - 400).max() < 100

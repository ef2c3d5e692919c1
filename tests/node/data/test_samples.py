"""Which samples a step takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dtfm.node.data import samples
from dtfm.node.data.samples import (
    BLOCK,
    evaluation_samples,
    held_out,
    mixed_samples,
    shares_of,
    training_samples,
)

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


several = st.lists(st.tuples(st.integers(1, 60), st.floats(0.01, 100)), min_size=2, max_size=4)


def mixed(seed: int, numbers: range, micro_batch: int, sources: list[tuple[int, float]]) -> list[int]:
    counts, weights = zip(*sources, strict=True)
    taken = (mixed_samples(seed, n, micro_batch=micro_batch, counts=counts, weights=weights) for n in numbers)
    return [int(index) for each in taken for index in each]


@given(seed=st.integers(0, 2**64 - 1), sources=several, block=st.integers(4, 50))
def test_each_sample_of_a_source_comes_once_per_pass(seed: int, sources: list[tuple[int, float]], block: int) -> None:
    """Whatever passes the other sources are in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "BLOCK", block)
        samples._block.cache_clear()
        order = mixed(seed, range(200), 3, sources)
        samples._block.cache_clear()
    first = 0
    for count, _ in sources:
        mine = [index - first for index in order if first <= index < first + count]
        for number in range(len(mine) // count):
            assert sorted(mine[number * count : (number + 1) * count]) == list(range(count))
        first += count
        assert len(set(mine)) == min(len(mine), count)


@given(sources=several)
def test_each_source_has_its_part_by_weight(sources: list[tuple[int, float]]) -> None:
    weights = [weight for _, weight in sources]
    shares = shares_of(weights)
    assert sum(shares) == BLOCK
    assert all(abs(share - BLOCK * w / sum(weights)) <= 2 for share, w in zip(shares, weights, strict=True))


def test_the_smallest_of_weights_still_has_a_part() -> None:
    assert shares_of([1.0, 1e-6, 1e6]) == (1, 1, BLOCK - 2)


def test_sources_are_mixed_from_the_first_steps_on() -> None:
    order = mixed(1, range(100), 10, [(1000, 3.0), (1000, 1.0)])
    assert 680 < sum(index < 1000 for index in order) < 820
    assert order == mixed(1, range(50), 20, [(1000, 3.0), (1000, 1.0)]), "however steps are cut into micro-batches"
    assert order != mixed(2, range(100), 10, [(1000, 3.0), (1000, 1.0)])


def test_the_mixed_order_is_the_same_everywhere() -> None:
    # Written down once: another NumPy, another machine must draw the same.
    assert mixed(1, range(3), 4, [(5, 1.0), (5, 1.0)]) == [7, 3, 5, 2, 8, 0, 1, 4, 0, 9, 3, 4]


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

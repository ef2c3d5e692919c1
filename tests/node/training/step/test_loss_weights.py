"""Each learnt label of a step counts alike, however the step is divided."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from dtfm.node.training.step.loss_weights import Part, by_sample, by_token

#: By micro-batch of an island, the losses of its learnt labels.
Island = list[list[int]]
ISLANDS = st.lists(
    st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=5), min_size=1, max_size=4
)


def part(*islands: Island) -> Part:
    losses = [micro_batch for island in islands for micro_batch in island]
    return Part(len(losses), sum(map(len, losses)))


def mean(*islands: Island) -> Fraction:
    losses = [loss for island in islands for micro_batch in island for loss in micro_batch]
    return Fraction(sum(losses), len(losses))


@given(islands=ISLANDS)
def test_an_island_trains_the_mean_over_its_learnt_labels(islands: list[Island]) -> None:
    for island in islands:
        weights = by_token(part(island), part(*islands))
        assert weights.label is not None
        trained = sum(weights.label * sum(micro_batch) * weights.micro_batch for micro_batch in island)
        assert trained == pytest.approx(float(mean(island)), rel=1e-12)


@given(islands=ISLANDS)
def test_what_votes_tell_adds_up_to_the_mean_over_all_learnt_labels_of_the_step(islands: list[Island]) -> None:
    told = list[float]()
    for island in islands:
        weights = by_token(part(island), part(*islands))
        assert weights.label is not None
        told += [weights.label * sum(micro_batch) * weights.told for micro_batch in island]
    assert sum(told) / len(told) == pytest.approx(float(mean(*islands)), rel=1e-12)


@given(islands=ISLANDS)
def test_a_single_islands_losses_are_told_as_they_are(islands: list[Island]) -> None:
    assert by_token(part(*islands), part(*islands)).told == 1.0


@given(micro_batches=st.integers(1, 99), length=st.integers(1, 99))
def test_where_all_samples_learn_the_same_number_of_labels_both_ways_are_equal(micro_batches: int, length: int) -> None:
    whole = Part(micro_batches, micro_batches * 4 * length)
    by_tokens, by_samples = by_token(whole, whole), by_sample(micro_batches)
    assert by_tokens.label == pytest.approx(1 / (4 * length), rel=1e-15)
    assert by_tokens.micro_batch == by_samples.micro_batch

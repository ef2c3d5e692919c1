"""Each sample counts alike in the loss, or each learnt label, wherever the other samples are computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional

from dtfm.node.data.samples import NOT_LEARNT
from dtfm.node.model.loss import label_weights, loss_of_part
from dtfm.node.model.model import Part
from tests.node.model.test_loss import score


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [b, s, 5] and labels [b, s], of each sample at least one learnt."""
    samples, length, seed = draw(st.integers(1, 6)), draw(st.integers(1, 7)), draw(st.integers(0, 999))
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (samples, length), generator=random)
    hidden = torch.rand((samples, length), generator=random) < draw(st.sampled_from([0.0, 0.5, 0.9]))
    hidden[:, 0] = False
    logits = torch.randn(samples, length, 5, generator=random, dtype=torch.float64)
    return logits, labels.masked_fill(hidden, NOT_LEARNT)


@given(batch=batches())
def test_the_loss_is_the_mean_over_samples_of_each_ones_mean(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels = batch
    apart = [functional.cross_entropy(x, y, ignore_index=NOT_LEARNT) for x, y in zip(logits, labels, strict=True)]
    torch.testing.assert_close(score(logits, labels).mean, torch.stack(apart).mean(), rtol=1e-12, atol=1e-12)


@given(batch=batches(), cut=st.integers(1, 5))
def test_micro_batches_make_the_loss_of_the_whole_batch(batch: tuple[torch.Tensor, torch.Tensor], cut: int) -> None:
    logits, labels = batch
    parts = [score(x, y).mean * len(y) for x, y in zip(torch.split(logits, cut), torch.split(labels, cut), strict=True)]
    torch.testing.assert_close(
        torch.stack(parts).sum() / len(labels), score(logits, labels).mean, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 4, 5)])
def test_where_all_is_learnt_all_labels_weigh_the_same(shape: tuple[int, ...]) -> None:
    labels = torch.zeros(shape, dtype=torch.int64)
    torch.testing.assert_close(
        label_weights(labels, torch.float64), torch.full(shape, 1 / labels.numel(), dtype=torch.float64)
    )


def test_a_sample_with_nothing_to_learn_adds_nothing() -> None:
    labels = torch.tensor([[NOT_LEARNT, NOT_LEARNT], [1, NOT_LEARNT]])
    assert label_weights(labels, torch.float32).tolist() == [[0, 0], [0.5, 0]]


@given(batch=batches(), weight=st.floats(0.01, 10))
def test_with_a_weight_for_each_label_all_learnt_labels_count_alike(
    batch: tuple[torch.Tensor, torch.Tensor], weight: float
) -> None:
    logits, labels = batch
    found = loss_of_part(Part(lambda x: x), logits, labels, logits.shape[-1], (), per_label=weight).mean
    summed = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(found, summed * weight, rtol=1e-12, atol=1e-12)

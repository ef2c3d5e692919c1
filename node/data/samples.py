"""What one sample is, and which samples each step takes: pure functions of the seed, alike on every node."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import floor

import numpy as np
import torch
from numpy.typing import NDArray

# Epochs that no run reaches, for permutations that do not belong to one.
_HELD_OUT, _EVALUATION_ORDER = 2**64 - 1, 2**64 - 2


@dataclass(frozen=True, slots=True)
class Sample:
    """Shape (without the batch) and dtype of one input of the model; ``vocabulary`` is the number of token ids, for text."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    vocabulary: int | None = None


def training_samples(
    seed: int, step: int, micro_batch_number: int, *, global_batch: int, micro_batch: int, count: int
) -> NDArray[np.int64]:
    """Which training samples one micro-batch takes: int64 of shape [micro_batch], values in [0, count).

    Steps are numbered from 1, micro-batches from 0 within a step. Read in the order (step, micro-batch, row), the samples
    run through one permutation per epoch, drawn anew from (seed, epoch): each comes exactly once per epoch, whatever the
    sizes. A step may therefore end one epoch and begin the next.
    """
    assert step >= 1, step
    assert 0 <= micro_batch_number < global_batch // micro_batch, micro_batch_number
    assert count >= 1, "the data set has refused to be empty"
    start = (step - 1) * global_batch + micro_batch_number * micro_batch
    position = np.arange(start, start + micro_batch, dtype=np.int64)
    epochs, rows = np.divmod(position, count)
    indices = np.empty(micro_batch, dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = _permutation(seed, int(epoch), count)[rows[here]]
    return indices


def evaluation_samples(micro_batch_number: int, *, micro_batch: int, count: int) -> NDArray[np.int64]:
    """Which held-out samples one evaluation micro-batch takes: int64 of shape [micro_batch], values in [0, count).

    Every evaluation of any run sees the same samples, so that losses can be compared: the first ones of one fixed
    permutation. A held-out part that is too small is read again from its start.
    """
    assert count >= 1, "the data set has refused to be empty"
    start = micro_batch_number * micro_batch
    return _permutation(0, _EVALUATION_ORDER, count)[np.arange(start, start + micro_batch, dtype=np.int64) % count]


def held_out(count: int, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of the training samples and of those held out for evaluation, of ``count`` (at least 2) in all; each rising.

    The choice is as if at random, so that no order in the data shows in it, but the same for all runs. There is at least
    one of either kind.
    """
    assert count >= 2, count
    held = min(max(floor(count * fraction), 1), count - 1)
    order = _permutation(0, _HELD_OUT, count)
    return np.sort(order[held:]), np.sort(order[:held])


@lru_cache(maxsize=3)
def _permutation(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    # Sorting raw Philox words rather than Generator.permutation: the words are fixed by the algorithm's definition, the
    # method may change between NumPy versions, and nodes with different ones must still agree. Stable for equal words.
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(count)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order

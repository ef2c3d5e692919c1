"""Describes a sample, and says which samples each step takes: pure functions of the seed, equal on every node."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import floor

import numpy as np
import torch
from numpy.typing import NDArray

# Epochs that no run reaches, for permutations that belong to no epoch.
_HELD_OUT, _EVALUATION_ORDER = 2**64 - 1, 2**64 - 2
# From here on, an epoch for each block of mixed samples; and the epochs of each source.
_BLOCKS, _PASSES = 2**63, 2**48
# From here on, an epoch for the order of the chapters in each pass. Chapters' own epochs are those of as many sources.
_CHAPTERS = 2**62
BLOCK = 1 << 16
"""The length of a stretch of positions. Each source has its part of each stretch."""


NOT_LEARNT = -100
"""Stands in place of a label that is not learnt."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Shape (without the batch) and dtype of one input of the model. ``vocabulary`` is the number of token ids, for text.
    ``isolated``: the input holds several documents, and the model is to read each by itself (see `positions_in_documents`)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    vocabulary: int | None = None
    isolated: bool = False


def positions_in_documents(ids: torch.Tensor, border: int) -> torch.Tensor:
    """The position of each token in its document: int64, like ``ids`` [b, s].

    A document begins with the token ``border``: the tokenizer's own first token, or, if it has none, the token that ends the
    document before. Such an end is the last label of the earlier document, and the first input of the later one. A sample's
    first document goes on from the sample before, but its positions begin here.
    """
    places = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    return places - torch.where(ids == border, places, 0).cummax(-1).values


def training_samples(seed: int, number: int, *, micro_batch: int, count: int) -> NDArray[np.int64]:
    """The training samples of a micro-batch: int64 of shape [micro_batch], values in [0, count).

    The micro-batches of a run are numbered from 0. In the order (micro-batch, row), the samples follow one permutation per
    epoch, a function of (seed, epoch): each comes exactly once per epoch, whatever the sizes. So a step may end one epoch and
    begin the next.
    """
    assert number >= 0, number
    assert count >= 1, "the data set has refused to be empty"
    start = number * micro_batch
    position = np.arange(start, start + micro_batch, dtype=np.int64)
    epochs, rows = np.divmod(position, count)
    indices = np.empty(micro_batch, dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = _permutation(seed, int(epoch), count)[rows[here]]
    return indices


def mixed_samples(
    seed: int, number: int, *, micro_batch: int, counts: Sequence[int], weights: Sequence[float]
) -> NDArray[np.int64]:
    """`training_samples` of several sources with these ``counts`` of samples, numbered one source after the other: int64 of shape
    [micro_batch], values in [0, sum of ``counts``).

    All positions of a run are cut into blocks. In each block every source has the same number of positions, by its weight, in an
    order that is a function of (seed, block). A source's samples follow one permutation per pass, a function of (seed, source,
    pass): each comes exactly once per pass.
    """
    shares = shares_of(weights)
    positions = np.arange(number * micro_batch, (number + 1) * micro_batch, dtype=np.int64)
    firsts, found = np.cumsum([0, *counts]), np.empty(micro_batch, dtype=np.int64)
    for block in np.unique(positions // BLOCK).tolist():
        sources, ranks = _block(seed, block, shares)
        here = np.flatnonzero(positions // BLOCK == block)
        places = positions[here] % BLOCK
        for source in np.unique(sources[places]).tolist():
            mine = sources[places] == source
            drawn = block * shares[source] + ranks[places[mine]]
            passes, rows = np.divmod(drawn, counts[source])
            samples = np.empty(len(rows), dtype=np.int64)
            for each in np.unique(passes).tolist():
                samples[passes == each] = _pass(seed, source, each, counts[source])[rows[passes == each]]
            found[here[mine]] = firsts[source] + samples
    return found


@lru_cache(maxsize=4)
def chapter_order(seed: int, number: int, chapters: int) -> tuple[int, ...]:
    """The chapters in the order of this pass. The first pass begins with chapter 0, whatever the seed: it has the held-out
    samples that runs evaluate."""
    order = [int(each) for each in _permutation(seed, _CHAPTERS + number, chapters)]
    return (0, *(each for each in order if each)) if number == 0 else tuple(order)


def chapter_samples(seed: int, chapter: int, number: int, count: int) -> NDArray[np.int64]:
    """The order of a chapter's ``count`` training samples in this pass: a permutation."""
    return _permutation(seed, chapter * _PASSES + number, count)


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """The number of positions of each source in a block: by its weight, and at least 1. The sum is BLOCK."""
    exact = [Fraction(weight) * BLOCK / sum(map(Fraction, weights)) for weight in weights]
    shares = [max(1, floor(share)) for share in exact]
    order = sorted(range(len(exact)), key=lambda source: shares[source] - exact[source])
    for source in itertools.cycle(order):
        if (missing := BLOCK - sum(shares)) == 0:
            return tuple(shares)
        if missing > 0:
            shares[source] += 1
        else:
            shares[shares.index(max(shares))] -= 1
    raise AssertionError("there are no sources")


def evaluation_samples(micro_batch_number: int, *, micro_batch: int, count: int) -> NDArray[np.int64]:
    """The held-out samples of one evaluation micro-batch: int64 of shape [micro_batch], values in [0, count).

    Every evaluation of any run takes the same samples, so that losses can be compared: the first samples of a fixed
    permutation. If there are too few, they are taken again from the start.
    """
    assert count >= 1, "the data set has refused to be empty"
    start = micro_batch_number * micro_batch
    return _permutation(0, _EVALUATION_ORDER, count)[np.arange(start, start + micro_batch, dtype=np.int64) % count]


def held_out(count: int, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of the training samples and of the samples held out for evaluation, of ``count`` (at least 2); both ascending.

    The choice is pseudo-random, so that no order in the data shows in it, but the same for all runs. Each part has at least
    one sample.
    """
    assert count >= 2, count
    held = held_out_count(count, fraction)
    order = _permutation(0, _HELD_OUT, count)
    return np.sort(order[held:]), np.sort(order[:held])


def held_out_count(count: int, fraction: float) -> int:
    """How many of ``count`` samples `held_out` holds out."""
    return min(max(floor(count * fraction), 1), count - 1)


@lru_cache(maxsize=4)
def _block(seed: int, block: int, shares: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """By position in the block, its source, and the number of positions of that source before it."""
    order = _permutation(seed, _BLOCKS + block, BLOCK)
    sources = np.repeat(np.arange(len(shares), dtype=np.int64), shares)[order]
    ranks = np.empty(BLOCK, dtype=np.int64)
    for source, share in enumerate(shares):
        ranks[sources == source] = np.arange(share)
    return sources, ranks


@lru_cache(maxsize=128)
def _pass(seed: int, source: int, number: int, count: int) -> NDArray[np.int64]:
    """The order of a source's samples in one pass."""
    return _permutation(seed, source * _PASSES + number, count)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    # Sorting raw Philox words, not Generator.permutation: the algorithm defines the words, while the method may change between
    # NumPy versions, and nodes with different versions must agree. Stable for equal words.
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(count)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order

"""The training data of a run: numbered samples. Some of them are held out for evaluation."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from dtfm.node.data.samples import (
    NOT_LEARNT,
    Sample,
    held_out,
    held_out_count,
    mixed_samples,
    positions_in_documents,
    training_samples,
)
from dtfm.node.data.shared.published import TokenIndex, publish
from dtfm.node.data.text.tokenizer import Tokenizer, border
from dtfm.protos.source_files import Files

Indices = NDArray[np.int64]
Batch = tuple[torch.Tensor, torch.Tensor]
Tokens = Sequence[NDArray[Any]]
"""Of each source."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the members of a run agree on about its data."""

    fingerprint: bytes
    unigram_entropy: float


class Data(ABC):
    """Samples, the same on every node with the same ``fingerprint``."""

    sample: Sample
    """Describes one input."""
    tokens_per_sample: int
    """1 for data without tokens."""
    tokenizer: Tokenizer | None
    """None unless the data is text."""
    fingerprint: bytes
    unigram_entropy: float
    """The loss on the held-out part, in nats per label, of a model that knows only label frequencies."""
    was_read: bool = True
    """This node has read the source itself, so that it vouches for the fingerprint."""
    files: Files = ()
    """The files that it has read, for others to compare."""

    def __init__(
        self, counts: Sequence[int], evaluation_fraction: float, apart: int = 0, weights: Sequence[float] = (1.0,)
    ) -> None:
        """``counts``: the samples of each source, which has this weight. ``apart``: the number of samples of a last source, which
        are held out, and no others; 0: a fraction of each source is."""
        self._counts, self._evaluation_fraction, self._apart, self._weights = (
            counts,
            evaluation_fraction,
            apart,
            weights,
        )

    @cached_property
    def _parts(self) -> tuple[Indices, Indices]:
        """The samples for training, source by source, and for evaluation. Made only when needed: some nodes only count."""
        if self._apart:
            return np.arange(self.training_count), np.arange(self.training_count, self.training_count + self._apart)
        training, evaluation, before = list[Indices](), list[Indices](), 0
        for count in self._counts:
            for part, mine in zip((training, evaluation), held_out(count, self._evaluation_fraction), strict=True):
                part.append(mine + before)
            before += count
        return np.concatenate(training), np.concatenate(evaluation)

    @property
    def _of_sources(self) -> list[int]:
        """The training samples of each source."""
        fraction = self._evaluation_fraction
        return [each - (0 if self._apart else held_out_count(each, fraction)) for each in self._counts]

    @property
    def training_count(self) -> int:
        return sum(self._of_sources)

    @property
    def evaluation_count(self) -> int:
        return self._apart or sum(self._counts) - self.training_count

    def training_samples(self, seed: int, number: int, micro_batch: int) -> Indices:
        """The training samples of a micro-batch of the run, for `training_batch`."""
        if len(self._counts) == 1:
            return training_samples(seed, number, micro_batch=micro_batch, count=self.training_count)
        counts, weights = self._of_sources, self._weights
        return mixed_samples(seed, number, micro_batch=micro_batch, counts=counts, weights=weights)

    def training_batch(self, indices: Indices) -> Batch:
        """Inputs [b, *sample.shape] and labels ([b, s] for text, [b] for classes) of training samples, on the CPU."""
        return self._take(self._parts[0][indices])

    def evaluation_batch(self, indices: Indices) -> Batch:
        """Inputs and labels of held-out samples, as in `training_batch`."""
        return self._take(self._parts[1][indices])

    def training_learnt(self, indices: Indices) -> int:
        """The number of labels of these training samples that are learnt."""
        return self._learnt(self._parts[0][indices])

    def evaluation_learnt(self, indices: Indices) -> int:
        """The number of labels of these held-out samples that are learnt."""
        return self._learnt(self._parts[1][indices])

    def positions(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """The positions of the tokens in their documents, if ``sample`` is isolated: int64, like ``inputs``. Otherwise None."""
        return None

    def hold(self) -> None:  # noqa: B027  # whoever makes all samples has them
        """Brings all samples to this machine, which may take long. Raises ValueError or OSError. From any thread."""

    def reach(self, position: int) -> None:  # noqa: B027  # whoever has all samples has these
        """Returns once the run's training samples up to this position are on this machine. Raises ValueError."""

    def stop(self) -> None:  # noqa: B027  # whoever has all samples reads nothing
        """Ends what reads further samples. From any thread."""

    def publish(self, place: str) -> None:  # noqa: B027  # every node makes its own
        """Writes the data that other nodes can use to a folder that they reach. Raises the file system's exceptions. From any
        thread."""

    @abstractmethod
    def _take(self, numbers: Indices) -> Batch:
        """Samples by their number in the whole data set."""

    @abstractmethod
    def _learnt(self, numbers: Indices) -> int:
        """The number of their labels that are learnt."""


class TokenWindows(Data):
    """Windows of sequence_length + 1 consecutive tokens of a source. Each begins with the last token of the window before, so
    that every token of a source except the first is predicted once.

    In conversations, only answers are learnt. A token that is not learnt is stored as its id plus the tokenizer's size. Its
    label is NOT_LEARNT, and windows without anything to learn are left out.
    """

    def __init__(
        self,
        index: TokenIndex,
        tokens: Callable[[], Tokens],
        tokenizer: Tokenizer,
        agreed: Agreed | None = None,
        *,
        sample: Sample,
        is_marked: bool,
        weights: Sequence[float] = (1.0,),
    ) -> None:
        """``tokens`` returns the tokens of the ``index``'s sources. It is called when they are first needed: now, unless the
        run's members have ``agreed`` on the data before. ``is_marked``: tokens that are not learnt are stored as such.
        ``weights``: of the sources, except one of held-out samples."""
        length = index.sequence_length
        samples = samples_of(index)
        apart = samples.pop() if index.held_out_apart else 0
        super().__init__(samples, index.evaluation_fraction, apart, weights)
        self.sample = sample
        self.tokens_per_sample = length
        self.tokenizer = tokenizer
        self.fingerprint = index.fingerprint
        self._index, self._open, self._lock, self._is_marked = index, tokens, threading.Lock(), is_marked
        self._opened: Tokens | None = None
        self._borders = np.asarray(index.borders)
        self._window = np.arange(length + 1)
        self.was_read = agreed is None
        self.unigram_entropy = (
            agreed.unigram_entropy if agreed is not None else entropy(self._labels_counted(tokenizer.size))
        )

    def positions(self, inputs: torch.Tensor) -> torch.Tensor | None:
        if not self.sample.isolated:
            return None
        assert self.tokenizer is not None
        at = border(self.tokenizer)
        assert at is not None
        return positions_in_documents(inputs, at)

    def hold(self) -> None:
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
        _ = self._parts  # do the slow part now

    def publish(self, place: str) -> None:
        publish(place, self._index, self._tokens)

    @property
    def _tokens(self) -> Tokens:
        self.hold()
        assert self._opened is not None
        return self._opened

    def _learnt(self, numbers: Indices) -> int:
        if not self._is_marked:
            return len(numbers) * self.tokens_per_sample
        assert self.tokenizer is not None
        size, parts = self.tokenizer.size, np.array_split(numbers, math.ceil(len(numbers) / 1024))
        return sum(int(np.count_nonzero(self._stored(part)[:, 1:] < size)) for part in parts)

    def _stored(self, numbers: Indices) -> NDArray[Any]:
        """The tokens of these windows in their stored form: [b, sequence_length + 1]."""
        if self._numbers is not None:
            numbers = self._numbers[numbers]
        tokens, length = self._tokens, self.tokens_per_sample
        stored = np.empty((len(numbers), length + 1), tokens[0].dtype)
        of_source = np.searchsorted(self._borders, numbers, side="right") - 1
        for source in np.unique(of_source):
            rows = of_source == source
            stored[rows] = tokens[source][(numbers[rows] - self._borders[source])[:, None] * length + self._window]
        return stored

    def _take(self, numbers: Indices) -> Batch:
        assert self.tokenizer is not None
        stored = self._stored(numbers).astype(np.int64)
        if not self._is_marked:
            return torch.from_numpy(stored[:, :-1].copy()), torch.from_numpy(stored[:, 1:].copy())
        is_learnt = stored[:, 1:] < self.tokenizer.size
        both = stored % self.tokenizer.size
        labels = np.where(is_learnt, both[:, 1:], NOT_LEARNT)
        return torch.from_numpy(both[:, :-1].copy()), torch.from_numpy(labels)

    @cached_property
    def _numbers(self) -> Indices | None:
        """By a sample's number, its window's number. None: the same number."""
        left_out = self._index.left_out
        return np.delete(np.arange(self._index.windows), left_out) if left_out else None

    def _labels_counted(self, size: int) -> Indices:
        counts = np.zeros(size, dtype=np.int64)
        evaluation = self._parts[1]
        for part in np.array_split(evaluation, math.ceil(len(evaluation) / 1024)):
            labels = self._take(part)[1].numpy()
            counts += np.bincount(labels[labels != NOT_LEARNT], minlength=size)
        return counts


class TensorPairs(Data):
    """Inputs and labels made by a user's function."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor, evaluation_fraction: float) -> None:
        super().__init__([len(inputs)], evaluation_fraction)
        self.sample = Sample(tuple(inputs.shape[1:]), inputs.dtype)
        self.tokens_per_sample = 1
        self.tokenizer = None
        digest = blake3(f"{inputs.dtype} {list(inputs.shape)} {list(labels.shape)} {evaluation_fraction!r}".encode())
        digest.update(inputs.numpy().tobytes()).update(labels.numpy().tobytes())
        self.fingerprint = digest.digest()
        self._inputs, self._labels = inputs, labels
        self.unigram_entropy = entropy(np.bincount(labels[torch.from_numpy(self._parts[1])].flatten().numpy()))

    def _take(self, numbers: Indices) -> Batch:
        rows = torch.from_numpy(numbers)
        return self._inputs[rows], self._labels[rows]

    def _learnt(self, numbers: Indices) -> int:
        return len(numbers) * self._labels[0].numel()


def samples_of(index: TokenIndex) -> list[int]:
    """The number of samples of each source: its windows, without the windows that are left out."""
    windows = np.asarray(index.borders)
    left_out = np.searchsorted(np.asarray(index.left_out, dtype=np.int64), windows)
    return [int(each) for each in np.diff(windows - left_out)]


def entropy(counts: NDArray[np.int64]) -> float:
    """The entropy, in nats, of the distribution with these counts."""
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum()) + 0.0

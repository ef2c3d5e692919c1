"""The training data of a run: numbered samples. Some of them are held out for evaluation."""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from dtfm.node.data.allowed import EVERYTHING
from dtfm.node.data.published import TokenIndex, fetch, find, index_of, publish
from dtfm.node.data.samples import (
    NOT_LEARNT,
    Sample,
    held_out,
    held_out_count,
    mixed_samples,
    positions_in_documents,
    training_samples,
)
from dtfm.node.data.sources import Reading, Source, held_out_of, named, sources_of
from dtfm.node.data.tokenizer import Tokenizer, border, load_tokenizer
from dtfm.node.data.tokens import read_tokens, stored
from dtfm.node.data.user_code import import_allowed
from dtfm.protos import plan_pb2
from dtfm.protos.places import COORDINATOR

log = logging.getLogger(__name__)
Indices = NDArray[np.int64]
Batch = tuple[torch.Tensor, torch.Tensor]
Tokens = Sequence[NDArray[Any]]
"""Of each source."""
_WINDOWS_AT_ONCE = 1 << 14


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
        mixed = {"counts": self._of_sources, "weights": self._weights}
        return mixed_samples(seed, number, micro_batch=micro_batch, **mixed)

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


def text_sample(data: plan_pb2.Run.Data) -> tuple[Sample, Tokenizer]:
    """The description of a sample of text, and the tokenizer that makes samples: known before any text is read. Raises
    ValueError."""
    tokenizer, isolated = load_tokenizer(data.tokenizer), data.isolate_documents
    if isolated and (border(tokenizer) is None or any(source.talks for source in sources_of(data))):
        raise ValueError(
            "data.isolate_documents: the borders of documents cannot be told in conversations, nor with a data.tokenizer without "
            f"an end-of-text token, like {data.tokenizer!r}; name one that has it, or leave isolate_documents out"
        )
    return Sample((data.sequence_length,), torch.int64, tokenizer.size, isolated), tokenizer


def is_text(data: plan_pb2.Run.Data) -> bool:
    """Whether the samples are windows of a text; otherwise a function of the user's makes them."""
    return not data.source.startswith("module:")


def load_data(
    run: plan_pb2.Run,
    allowed_modules: Sequence[str] = (),
    cache: Path | None = None,
    agreed: Agreed | None = None,
    allowed: Sequence[str] = EVERYTHING,
    reading: Reading = lambda done, of: None,
) -> Data:
    """Loads the training data of the run.

    ``allowed_modules`` are the import paths that this node's operator lets a run name, and ``allowed`` the files (see
    read_allowed). Text is tokenized once, into a file, so that it need not fit into memory. The file is in the folder
    ``cache``, which the nodes of a machine share; otherwise it is an unnamed temporary one.

    If the run's members have ``agreed`` on the data, and one of them has published its tokens, nothing is read before samples
    are needed. Then these tokens are fetched. ``reading``: see `documents`.

    Raises:
        ValueError: the source or the tokenizer cannot be read, or there is too little data; the message names the key.
    """
    data = run.data
    if not is_text(data):
        if data.isolate_documents:
            raise ValueError("data.isolate_documents: a function's samples are no documents; leave it out")
        path = data.source.removeprefix("module:")
        make = import_allowed(path, allowed_modules, "data.source")
        try:
            made = make()
        except Exception as problem:  # whatever the user's function raises
            raise ValueError(f"data.source: {path} failed: {type(problem).__name__}: {problem}") from problem
        inputs, labels = _checked(made, data.source)
        return TensorPairs(inputs, labels, data.evaluation_fraction)
    sample, tokenizer = text_sample(data)
    weights = [source.weight for source in sources_of(data)]
    if agreed is not None and not run.checkpoint.uri.startswith(COORDINATOR):  # there, nobody publishes
        apart, of_run = held_out_of(data) is not None, (data.sequence_length, data.evaluation_fraction)
        number = len(_all_sources(data))
        published = find(run.checkpoint.uri, agreed.fingerprint, *of_run, number, held_out_apart=apart)
        if published is not None:
            tokens_later = partial(_fetched, run, published, tokenizer, cache, allowed)
            made = partial(TokenWindows, published, tokens_later, tokenizer, agreed)
            return made(sample=sample, is_marked=_is_marked(data), weights=weights)
    tokens = _read(data, tokenizer, cache, allowed, reading)
    index = _indexed(data, tokenizer, tokens)
    least = 1 if index.held_out_apart else 2
    for source, mine, samples in zip(_all_sources(data), tokens, samples_of(index), strict=True):
        if samples < least:
            wanted = "two windows" if least == 2 else "a window"
            both = " (one to train on, one held out)" if least == 2 else ""
            raise ValueError(
                f"{source.key}: {source.place!r} has {len(mine)} tokens, too few for {wanted} of data.sequence_length "
                f"{data.sequence_length} with something to learn{both}; give more text or a shorter length"
            )
    return TokenWindows(index, lambda: tokens, tokenizer, sample=sample, is_marked=_is_marked(data), weights=weights)


def _all_sources(data: plan_pb2.Run.Data) -> list[Source]:
    """In the order of their tokens: the source of held-out samples is the last."""
    apart = held_out_of(data)
    return [*sources_of(data), *([apart] if apart is not None else [])]


def _is_marked(data: plan_pb2.Run.Data) -> bool:
    """Whether tokens that are not learnt are stored as such."""
    return any(source.talks for source in _all_sources(data))


def _read(
    data: plan_pb2.Run.Data,
    tokenizer: Tokenizer,
    cache: Path | None,
    allowed: Sequence[str],
    reading: Reading = lambda done, of: None,
) -> Tokens:
    marked = _is_marked(data)
    return [read_tokens(source, tokenizer, cache, allowed, reading, is_marked=marked) for source in _all_sources(data)]


def _indexed(data: plan_pb2.Run.Data, tokenizer: Tokenizer, tokens: Tokens) -> TokenIndex:
    length, left_out, before = data.sequence_length, list[int](), 0
    for mine in tokens if _is_marked(data) else ():
        left_out += [before + number for number in _nothing_learnt(mine, length, tokenizer.size)]
        before += max(0, len(mine) - 1) // length
    apart = held_out_of(data) is not None
    return index_of(tokens, length, data.evaluation_fraction, tuple(left_out), held_out_apart=apart)


def _nothing_learnt(tokens: NDArray[Any], length: int, size: int) -> tuple[int, ...]:
    """The windows without any label that is learnt."""
    windows, found = (len(tokens) - 1) // length, list[int]()
    for first in range(0, windows, _WINDOWS_AT_ONCE):
        count = min(_WINDOWS_AT_ONCE, windows - first)
        labels = tokens[first * length + 1 : (first + count) * length + 1].reshape(count, length)
        found += (first + np.flatnonzero((labels >= size).all(axis=1))).tolist()
    return tuple(found)


def _fetched(
    run: plan_pb2.Run, index: TokenIndex, tokenizer: Tokenizer, cache: Path | None, allowed: Sequence[str]
) -> Tokens:
    """The tokens of ``index`` as another node has published them. If these are not the tokens that all agree on, the source's."""

    def make(file: BinaryIO) -> blake3:
        return fetch(run.checkpoint.uri, index, file)

    try:
        whole = stored(cache, index.fingerprint.hex()[:32], np.dtype(index.dtype), make, lasting=True)
        return np.split(whole, np.cumsum(index.parts)[:-1]) if index.parts else [whole]
    except Exception as problem:  # whatever the file system raises
        log.warning("the published tokens cannot be used (%s); reading %s instead", problem, named(run.data))
    tokens = _read(run.data, tokenizer, cache, allowed)
    if _indexed(run.data, tokenizer, tokens) != index:
        raise ValueError(
            f"data.source: {named(run.data)!r} has other text here than where the run began, and the tokens that were published "
            f"beside {run.checkpoint.uri} cannot be used; give this node the same files"
        )
    return tokens


def entropy(counts: NDArray[np.int64]) -> float:
    """The entropy, in nats, of the distribution with these counts."""
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum()) + 0.0


def _checked(made: Any, source: str) -> Batch:
    if not (isinstance(made, tuple) and len(made) == 2 and all(isinstance(x, torch.Tensor) for x in made)):
        raise ValueError(f"data.source: {source} must return two tensors (inputs, labels), not {type(made).__name__}")
    inputs, labels = (x.detach().cpu().contiguous() for x in made)
    if len(inputs) != len(labels) or len(inputs) < 2:
        raise ValueError(
            f"data.source: {source} returned {len(inputs)} inputs and {len(labels)} labels; their numbers must be equal, "
            "and at least two"
        )
    if labels.dtype != torch.int64 or labels.min() < 0:
        raise ValueError(f"data.source: {source} must return class numbers as labels, int64 from 0, not {labels.dtype}")
    if inputs.is_floating_point():
        inputs = inputs.float()
    elif inputs.dtype != torch.int64:
        raise ValueError(
            f"data.source: {source} returned inputs of {inputs.dtype}; make them float32, or int64 for ids"
        )
    return inputs, labels

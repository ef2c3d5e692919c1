"""What a run trains on: numbered samples, of which some are held out for evaluation."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from dtfm.node.data.cache import Tokens, is_usable, shared
from dtfm.node.data.samples import Sample, held_out
from dtfm.node.data.sources import Document, documents, state_of
from dtfm.node.data.tokenizer import Tokenizer, load_tokenizer
from dtfm.node.data.user_code import import_allowed
from dtfm.protos import plan_pb2

log = logging.getLogger(__name__)
Indices = NDArray[np.int64]
Batch = tuple[torch.Tensor, torch.Tensor]
_PROGRESS_SECONDS = 2.0  # between two log lines while reading


class Data(ABC):
    """Samples, the same on every node with the same ``fingerprint``.

    ``sample`` describes one input. ``tokens_per_sample`` is 1 for data without tokens. ``unigram_entropy`` is the loss on the
    held-out part, in nats per label, of a model that knows only label frequencies. ``tokenizer`` is None unless the data is
    text.
    """

    sample: Sample
    tokens_per_sample: int
    tokenizer: Tokenizer | None
    fingerprint: bytes
    unigram_entropy: float

    def __init__(self, count: int, evaluation_fraction: float) -> None:
        self._training, self._evaluation = held_out(count, evaluation_fraction)

    @property
    def training_count(self) -> int:
        return len(self._training)

    @property
    def evaluation_count(self) -> int:
        return len(self._evaluation)

    def training_batch(self, indices: Indices) -> Batch:
        """Inputs [b, *sample.shape] and labels ([b, s] for text, [b] for classes) of training samples, on the CPU."""
        return self._take(self._training[indices])

    def evaluation_batch(self, indices: Indices) -> Batch:
        """The same for held-out samples."""
        return self._take(self._evaluation[indices])

    @abstractmethod
    def _take(self, numbers: Indices) -> Batch:
        """Samples by their number in the whole data set."""


class TokenWindows(Data):
    """Windows of sequence_length + 1 consecutive tokens. Each begins with the last token of the one before, so that every token
    except the first is predicted once."""

    def __init__(self, tokens: NDArray[Any], digest: blake3, tokenizer: Tokenizer, data: plan_pb2.Run.Data) -> None:
        length = data.sequence_length
        count = (len(tokens) - 1) // length
        if count < 2:
            raise ValueError(
                f"data.source: {data.source!r} has {len(tokens)} tokens, too few for two windows of data.sequence_length "
                f"{length} (one to train on, one held out); give more text or a shorter length"
            )
        super().__init__(count, data.evaluation_fraction)
        self.sample = Sample((length,), torch.int64, tokenizer.size)
        self.tokens_per_sample = length
        self.tokenizer = tokenizer
        digest.update(f"{tokens.dtype} {length} {data.evaluation_fraction!r}".encode())
        self.fingerprint = digest.digest()
        self._tokens = tokens
        self._window = np.arange(length + 1)
        self.unigram_entropy = entropy(self._labels_counted(tokenizer.size))

    def _take(self, numbers: Indices) -> Batch:
        windows = self._tokens[numbers[:, None] * self.tokens_per_sample + self._window].astype(np.int64)
        both = torch.from_numpy(windows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _labels_counted(self, size: int) -> Indices:
        counts = np.zeros(size, dtype=np.int64)
        for part in np.array_split(self._evaluation, math.ceil(len(self._evaluation) / 1024)):
            counts += np.bincount(self._take(part)[1].flatten().numpy(), minlength=size)
        return counts


class TensorPairs(Data):
    """Inputs and labels made by a user's function."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor, evaluation_fraction: float) -> None:
        super().__init__(len(inputs), evaluation_fraction)
        self.sample = Sample(tuple(inputs.shape[1:]), inputs.dtype)
        self.tokens_per_sample = 1
        self.tokenizer = None
        digest = blake3(f"{inputs.dtype} {list(inputs.shape)} {list(labels.shape)} {evaluation_fraction!r}".encode())
        digest.update(inputs.numpy().tobytes()).update(labels.numpy().tobytes())
        self.fingerprint = digest.digest()
        self._inputs, self._labels = inputs, labels
        self.unigram_entropy = entropy(np.bincount(labels[torch.from_numpy(self._evaluation)].flatten().numpy()))

    def _take(self, numbers: Indices) -> Batch:
        rows = torch.from_numpy(numbers)
        return self._inputs[rows], self._labels[rows]


def load_data(run: plan_pb2.Run, allowed_modules: Sequence[str] = (), cache: Path | None = None) -> Data:
    """Loads what the run trains on.

    ``allowed_modules`` are the import paths that this node's operator lets a run name. Text is tokenized once, into a file, so
    that it need not fit into memory: in the folder ``cache``, where the nodes of a machine share it; else into an unnamed
    temporary one.

    Raises:
        ValueError: the source or the tokenizer cannot be read, or there is too little data; the message names the key.
    """
    data = run.data
    if data.source.startswith("module:"):
        path = data.source.removeprefix("module:")
        make = import_allowed(path, allowed_modules, "data.source")
        try:
            made = make()
        except Exception as problem:  # whatever the user's function raises
            raise ValueError(f"data.source: {path} failed: {type(problem).__name__}: {problem}") from problem
        inputs, labels = _checked(made, data.source)
        return TensorPairs(inputs, labels, data.evaluation_fraction)
    tokenizer = load_tokenizer(data.tokenizer)
    try:
        if cache is not None and (tokens := _shared(data, tokenizer, cache)) is not None:
            return TokenWindows(*tokens, tokenizer, data)
        return TokenWindows(*tokenize(documents(data.source, data.text_field), tokenizer), tokenizer, data)
    except OSError as problem:
        raise ValueError(
            f"data.source: {data.source!r} could not be read, or its tokens not stored: {problem}"
        ) from problem


def _shared(data: plan_pb2.Run.Data, tokenizer: Tokenizer, cache: Path) -> Tokens | None:
    """The tokens that the nodes of this machine share; None if they cannot share these."""
    if not tokenizer.identity or not is_usable(cache):
        return None
    before = state_of(data.source)
    name = blake3(f"{data.source}\n{data.text_field}\n{before}\n{tokenizer.separator}\n".encode())
    name.update(tokenizer.identity)

    def make(file: BinaryIO) -> blake3:
        digest, _ = _write(documents(data.source, data.text_field), tokenizer, file)
        if state_of(data.source) != before:
            raise ValueError(f"data.source: {data.source!r} changed while it was read; start again when it does not")
        return digest

    return shared(cache, name.hexdigest(16), dtype_of(tokenizer), make, lasting=before != "")


def tokenize(texts: Iterable[Document], tokenizer: Tokenizer) -> Tokens:
    """All tokens in order (1-D, of the narrowest unsigned dtype that fits, mapped from a temporary file), and a digest of their
    bytes."""
    dtype = dtype_of(tokenizer)
    with tempfile.TemporaryFile(prefix="dtfm-tokens-") as file:
        digest, size = _write(texts, tokenizer, file)
        file.flush()
        if not size:
            return np.empty(0, dtype), digest
        return np.memmap(file, dtype=dtype, mode="r", shape=(size // dtype.itemsize,)), digest


def dtype_of(tokenizer: Tokenizer) -> np.dtype[Any]:
    """The narrowest unsigned one."""
    return np.dtype("<u1" if tokenizer.size <= 1 << 8 else "<u2" if tokenizer.size <= 1 << 16 else "<u4")


def _write(texts: Iterable[Document], tokenizer: Tokenizer, file: IO[bytes]) -> tuple[blake3, int]:
    """The digest and the number of the bytes."""
    dtype = dtype_of(tokenizer)
    separator = np.asarray(tokenizer.separator, dtype=dtype).tobytes()
    digest, size, said = blake3(), 0, time.monotonic()
    for number, document in enumerate(texts):
        pieces = (tokenizer.encode(piece).astype(dtype, copy=False).tobytes() for piece in document)
        for piece in chain([separator] if number else [], pieces):
            file.write(piece)
            digest.update(piece)
            size += len(piece)
            if time.monotonic() - said > _PROGRESS_SECONDS:
                said = time.monotonic()
                log.info("reading the data: %.1f million tokens so far", size / dtype.itemsize / 1e6)
    return digest, size


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

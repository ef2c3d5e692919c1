"""From a run's description to its data: sources are read and tokenised here, or their tokens are fetched."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from dtfm.node.data.allowed import EVERYTHING
from dtfm.node.data.chapters import Chapter, cut
from dtfm.node.data.dataset import Agreed, Batch, Data, TensorPairs, Tokens, TokenWindows, samples_of
from dtfm.node.data.reading.file_digests import files_read
from dtfm.node.data.reading.files import files_of
from dtfm.node.data.reading.sources import Reading, Source, held_out_of, named, sources_of, state_of
from dtfm.node.data.samples import Sample
from dtfm.node.data.shared.cache import let_go
from dtfm.node.data.shared.published import TokenIndex, fetch, find, index_of
from dtfm.node.data.streamed import StreamedWindows
from dtfm.node.data.text.tokenizer import Tokenizer, border, load_tokenizer
from dtfm.node.data.tokens import chapter_tokens, read_tokens, stored
from dtfm.node.data.user_code import import_allowed
from dtfm.protos import plan_pb2
from dtfm.protos.places import COORDINATOR

log = logging.getLogger(__name__)

_WINDOWS_AT_ONCE = 1 << 14


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
    published_there = not data.chapter_bytes and not run.checkpoint.uri.startswith(COORDINATOR)
    if agreed is not None and published_there:
        apart, of_run = held_out_of(data) is not None, (data.sequence_length, data.evaluation_fraction)
        number = len(_all_sources(data))
        published = find(run.checkpoint.uri, agreed.fingerprint, *of_run, number, held_out_apart=apart)
        if published is not None:
            tokens_later = partial(_fetched, run, published, tokenizer, cache, allowed)
            made = partial(TokenWindows, published, tokens_later, tokenizer, agreed)
            return made(sample=sample, is_marked=_is_marked(data), weights=weights)
    if data.chapter_bytes:
        (source,) = sources_of(data)
        state = state_of(source, allowed)
        chapters = cut(files_of(source.place, source.key, allowed), data.chapter_bytes)
        if len(chapters) > 1:
            return _streamed(run, source, chapters, state, cache, allowed, reading)
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
    found = TokenWindows(index, lambda: tokens, tokenizer, sample=sample, is_marked=_is_marked(data), weights=weights)
    found.files = files_read(_all_sources(data), cache, allowed)
    return found


def _streamed(
    run: plan_pb2.Run,
    source: Source,
    chapters: Sequence[Chapter],
    state: str,
    cache: Path | None,
    allowed: Sequence[str],
    reading: Reading,
) -> Data:
    """The samples of a source's chapters, whose files had this ``state`` when they were cut. Raises ValueError, also if the first
    one has too few."""
    data, marked = run.data, _is_marked(run.data)
    sample, tokenizer = text_sample(data)

    def read(number: int, reading: Reading) -> tuple[TokenIndex, NDArray[Any]]:
        name = f"{data.chapter_bytes}.{number}"
        tokens = chapter_tokens(source, chapters[number], name, tokenizer, cache, allowed, reading, is_marked=marked)
        if state_of(source, allowed) != state:  # the run's fingerprint has the digests of the files as they were
            raise ValueError(f"{source.key}: {source.place!r} has changed since the run began; make it as it was")
        index = _indexed(data, tokenizer, [tokens])
        let_go(tokens)
        if number == 0 and samples_of(index)[0] < 2:
            raise ValueError(
                f"data.chapter_bytes: the first chapter, of {data.chapter_bytes} bytes, has {len(tokens)} tokens, too few for "
                f"two windows of data.sequence_length {data.sequence_length} with something to learn; give larger chapters"
            )
        return index, tokens

    files = files_read([source], cache, allowed)
    if not files:
        raise ValueError(f"{source.key}: {source.place!r} cannot be read in chapters, as its files cannot be described")
    sizes = [sum(file.size for file in chapter) for chapter in chapters]
    log.info("the data are %d chapters; training begins with the first", len(chapters))
    return StreamedWindows(sizes, read, files, tokenizer, run.seed, reading, sample=sample, is_marked=marked)


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

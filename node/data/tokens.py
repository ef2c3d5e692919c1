"""From a source to its tokens: one long array, in a file."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from dtfm.node.data.reading.files import File
from dtfm.node.data.reading.messages import Conversation
from dtfm.node.data.reading.sources import (
    Document,
    Reading,
    Source,
    conversations,
    conversations_of,
    documents,
    documents_of,
    state_of,
)
from dtfm.node.data.shared.cache import is_usable, shared
from dtfm.node.data.text.rendered import Rendered
from dtfm.node.data.text.tokenizer import Tokenizer, between_documents

log = logging.getLogger(__name__)

T = TypeVar("T")
Tokens = NDArray[np.integer[Any]]
_READING = 2
"""Number of the way in which text becomes tokens here. Raise it when the tokens of the same source change: tokens that an
earlier version has stored are then not used."""
_PROGRESS_SECONDS = 2.0  # between two log lines while reading
_AT_ONCE = 1 << 21  # characters that are tokenized together: enough for many cores, tens of MB


def read_tokens(
    source: Source,
    tokenizer: Tokenizer,
    cache: Path | None,
    allowed: Sequence[str],
    reading: Reading = lambda done, of: None,
    *,
    is_marked: bool,
) -> NDArray[Any]:
    """All tokens of the source. In conversations, a token that is not learnt is its id plus the tokenizer's size. ``is_marked``:
    the run has such sources, so that all are stored in a dtype that has room for these.

    Raises ValueError if the source cannot be read, or for an id that the tokenizer should not make.
    """

    def made() -> Iterator[Tokens]:
        if source.talks:
            return conversation_tokens(conversations(source, allowed, reading), tokenizer)
        return text_tokens(documents(source, allowed, reading), tokenizer)

    return _made(source, tokenizer, cache, partial(state_of, source, allowed), made, is_marked=is_marked)


def chapter_tokens(
    source: Source,
    chapter: Sequence[File],
    name: str,
    tokenizer: Tokenizer,
    cache: Path | None,
    allowed: Sequence[str],
    reading: Reading,
    *,
    is_marked: bool,
) -> NDArray[Any]:
    """As `read_tokens`, of one chapter of the source, which has this ``name`` among them."""

    def made() -> Iterator[Tokens]:
        if source.talks:
            return conversation_tokens(conversations_of(chapter, source, reading), tokenizer)
        return text_tokens(documents_of(chapter, source, reading), tokenizer)

    return _made(
        source, tokenizer, cache, partial(state_of, source, allowed), made, is_marked=is_marked, part=f"-{name}"
    )


def _made(
    source: Source,
    tokenizer: Tokenizer,
    cache: Path | None,
    state: Callable[[], str],
    made: Callable[[], Iterator[Tokens]],
    *,
    is_marked: bool,
    part: str = "",
) -> NDArray[Any]:
    """The tokens that ``made`` returns, in a file of their own. ``state``: changes when the files do. ``part``: of the name."""
    dtype = stored_dtype(tokenizer, is_marked=is_marked)

    def make(file: BinaryIO) -> blake3:
        digest = write(made(), dtype, file)
        if state() != before:
            raise ValueError(f"{source.key}: {source.place!r} changed while it was read; start again when it does not")
        return digest

    try:
        before = state()
        named = f"{_READING}\n{source.reading}\n{dtype}\n{before}\n{tokenizer.separator}\n".encode()
        apart = b"chapters" if part else b""  # so that who reads all in one go does not take their files for its own
        name = blake3(named + tokenizer.identity + apart).hexdigest(16) + part if tokenizer.identity else ""
        return stored(cache, name, dtype, make, lasting=before != "")
    except OSError as problem:
        raise ValueError(
            f"{source.key}: {source.place!r} could not be read, or its tokens not stored: {problem}"
        ) from problem


def stored(
    cache: Path | None, name: str, dtype: np.dtype[Any], make: Callable[[BinaryIO], blake3], *, lasting: bool
) -> NDArray[Any]:
    """The tokens that ``make`` writes. They are in the folder that the nodes of this machine share, by ``name`` (see `shared`),
    if there is one. Otherwise they are in a temporary file."""
    if cache is not None and name and is_usable(cache):
        return shared(cache, name, dtype, make, lasting=lasting)
    with tempfile.TemporaryFile(prefix="dtfm-tokens-") as file:
        make(file)
        file.flush()
        size = file.tell()
        return np.memmap(file, dtype, "r", shape=(size // dtype.itemsize,)) if size else np.empty(0, dtype)


def stored_dtype(tokenizer: Tokenizer, *, is_marked: bool) -> np.dtype[Any]:
    """The dtype of stored tokens: the narrowest unsigned one. ``is_marked``: some are not learnt."""
    values = 2 * tokenizer.size if is_marked else tokenizer.size
    return np.dtype("<u1" if values <= 1 << 8 else "<u2" if values <= 1 << 16 else "<u4")


def write(made: Iterable[Tokens], dtype: np.dtype[Any], file: BinaryIO) -> blake3:
    """Writes the tokens in order, and returns their digest."""
    digest, size, said = blake3(), 0, time.monotonic()
    for tokens in made:
        content = tokens.astype(dtype, copy=False).tobytes()
        file.write(content)
        digest.update(content)
        size += len(content)
        if time.monotonic() - said > _PROGRESS_SECONDS:
            said = time.monotonic()
            log.info("reading the data: %.1f million tokens so far", size / dtype.itemsize / 1e6)
    return digest


def text_tokens(texts: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """The tokens of documents, in pieces. Each begins and ends as the tokenizer has it, and a separator is between two."""
    for batch in _batches(_parts(texts, tokenizer), lambda part: len(part.text)):
        first: Iterator[Tokens] = iter(tokenizer.encode_all([part.text for part in batch if part.is_first]))
        further: Iterator[Tokens] = iter(
            tokenizer.encode_further([part.text for part in batch if not part.is_first and part.text])
        )
        for part in batch:
            if part.text:
                yield _checked(next(first if part.is_first else further), tokenizer)
            if part.ids:
                yield np.asarray(part.ids)


def conversation_tokens(talking: Iterable[Conversation], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """The tokens of conversations, with a separator between two texts. What is not learnt is marked (see `read_tokens`)."""
    separator: Tokens = np.asarray(tokenizer.separator) + tokenizer.size
    is_first = True
    for batch in _batches(_rendered(talking, tokenizer), lambda rendered: len(rendered.text)):
        for ids, is_learnt in tokenizer.encode_rendered(batch):
            if not is_first:
                yield separator
            is_first = False
            yield _checked(ids, tokenizer) + np.where(is_learnt, 0, tokenizer.size)


def _rendered(talking: Iterable[Conversation], tokenizer: Tokenizer) -> Iterator[Rendered]:
    """The texts of all conversations. Says at the end what became of the turns."""
    whole, split, texts = 0, 0, 0
    for conversation in talking:
        try:
            found = tokenizer.render(conversation)
        except ValueError as problem:
            raise ValueError(f"{problem} ({conversation.where})") from problem
        if len(found) > 1:
            split, texts = split + 1, texts + len(found)
        else:
            whole += 1
        yield from found
    if split:
        log.warning(
            "the chat template of data.tokenizer writes earlier answers differently once others follow, in %d of %d "
            "conversations: each turn of these is learnt in a text of its own that ends with it, %d texts in all",
            split,
            whole + split,
            texts,
        )


def _checked(ids: Tokens, tokenizer: Tokenizer) -> Tokens:
    if ids.size and ids.max() >= tokenizer.size:
        raise ValueError(
            f"data.tokenizer: it makes the id {ids.max()}, but has only {tokenizer.size} tokens, so that ids from "
            f"{tokenizer.size} on are no tokens; use a tokenizer whose vocabulary has no gaps"
        )
    return ids


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a document, or ids. ``is_first``: the document begins with the piece."""

    text: str = ""
    is_first: bool = False
    ids: tuple[int, ...] = ()


def _parts(texts: Iterable[Document], tokenizer: Tokenizer) -> Iterator[_Part]:
    between = between_documents(tokenizer)
    for number, document in enumerate(texts):
        yield _Part(ids=(*(between if number else ()), *tokenizer.before))
        is_first = True
        for piece in document:
            if piece:
                yield _Part(piece, is_first)
                is_first = False
        yield _Part(ids=tokenizer.after)


def _batches(pieces: Iterable[T], characters: Callable[[T], int]) -> Iterator[list[T]]:
    """The pieces in batches of about _AT_ONCE characters."""
    batch, size = list[T](), 0
    for piece in pieces:
        batch.append(piece)
        size += characters(piece) + 1
        if size >= _AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch

"""A run's tokens beside its checkpoints: a newcomer fetches them instead of making them.

The tokens are in shards, with an index that has the digest of each shard. The index's own digest is the data's fingerprint. The
run's members agree on the fingerprint: so a node that knows it can check every byte that another node has written there.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any, BinaryIO

import fsspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from dtfm.node.data.reaching import open_place
from dtfm.node.data.shared.storage import write

log = logging.getLogger(__name__)

SHARD_BYTES = 64 << 20
INDEX = "index.json"
FORMAT = 1
_MOST_INDEX_BYTES = 16 << 20
_DTYPES = ("<u1", "<u2", "<u4")


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """All facts that decide which samples there are."""

    dtype: str
    tokens: int
    """The number of tokens."""
    shards: tuple[str, ...]
    """The BLAKE3 (hex) of each SHARD_BYTES of the tokens."""
    sequence_length: int
    evaluation_fraction: float
    left_out: tuple[int, ...] = ()
    """Windows without anything to learn."""
    parts: tuple[int, ...] = ()
    """The number of tokens of each source, in order; empty: there is one source."""
    held_out_apart: bool = False
    """The last source has the held-out samples, and the others have none."""

    @property
    def borders(self) -> tuple[int, ...]:
        """The number of windows before each source, and of all. A window has sequence_length + 1 tokens of one source, and begins
        with the last token of the window before."""
        tokens = self.parts or (self.tokens,)
        return tuple(accumulate((max(0, each - 1) // self.sequence_length for each in tokens), initial=0))

    @property
    def windows(self) -> int:
        """The number of windows of all sources."""
        return self.borders[-1]

    @property
    def content(self) -> bytes:
        """The content of the index's file, the same on every node."""
        facts = asdict(self)
        if not self.parts:  # the fingerprint of one source stays what earlier versions have made
            del facts["parts"], facts["held_out_apart"]
        return json.dumps({"format": FORMAT, **facts}, sort_keys=True).encode()

    @property
    def fingerprint(self) -> bytes:
        return blake3(self.content).digest()

    def shard(self, number: int) -> tuple[int, int]:
        """The first byte of a shard, and the number of its bytes."""
        start = number * SHARD_BYTES
        return start, min(SHARD_BYTES, self.tokens * np.dtype(self.dtype).itemsize - start)


def index_of(
    tokens: Sequence[NDArray[Any]],
    sequence_length: int,
    evaluation_fraction: float,
    left_out: tuple[int, ...] = (),
    *,
    held_out_apart: bool = False,
) -> TokenIndex:
    """``tokens``: of each source, all of one dtype."""
    size = sum(each.nbytes for each in tokens)
    shards = (_content(tokens, start, SHARD_BYTES) for start in range(0, size, SHARD_BYTES))
    digests = tuple(blake3(shard, max_threads=blake3.AUTO).hexdigest() for shard in shards)
    return TokenIndex(
        tokens[0].dtype.str.replace("|", "<"),
        sum(map(len, tokens)),
        digests,
        sequence_length,
        evaluation_fraction,
        left_out,
        tuple(map(len, tokens)) if len(tokens) > 1 else (),
        held_out_apart,
    )


def _content(tokens: Sequence[NDArray[Any]], start: int, size: int) -> memoryview | bytes:
    """At most ``size`` bytes of all sources' tokens in a row, from byte ``start`` on."""
    found = list[memoryview]()
    for each in tokens:
        content = each.view(np.uint8).data
        if start < len(content) and size > 0:
            found.append(content[start : start + size])
            size -= len(found[-1])
        start = max(0, start - len(content))
    return found[0] if len(found) == 1 else b"".join(found)


def publish(place: str, index: TokenIndex, tokens: Sequence[NDArray[Any]]) -> None:
    """Writes the files that are missing or have the wrong size. ``place`` is the run's folder for checkpoints.

    Raises ValueError if the index is larger than others read, and the file system's exceptions.
    """
    if len(index.content) > _MOST_INDEX_BYTES:
        raise ValueError(
            f"their index would have {len(index.content)} bytes; others read at most {_MOST_INDEX_BYTES}. "
            f"It leaves out {len(index.left_out)} windows; with a longer data.sequence_length these are fewer"
        )
    folder = _folder(place, index.fingerprint)
    fs, path = open_place(folder)
    written = 0
    for number in range(len(index.shards)):
        start, size = index.shard(number)
        if _size(fs, f"{path}/{_name(number)}") != size:
            write(folder, _name(number), _content(tokens, start, size))
            written += 1
    if _size(fs, f"{path}/{INDEX}") != len(index.content):
        write(folder, INDEX, index.content)
        written += 1
    if written:
        log.info("the data's %d tokens are in %s for others", index.tokens, folder)


def _size(fs: fsspec.AbstractFileSystem, path: str) -> int | None:
    """The file's size in bytes; None if there is no such file."""
    try:
        return int(fs.info(path)["size"])
    except FileNotFoundError:
        return None


def find(
    place: str,
    fingerprint: bytes,
    sequence_length: int,
    evaluation_fraction: float,
    sources: int = 1,
    *,
    held_out_apart: bool = False,
) -> TokenIndex | None:
    """The index with this fingerprint, for samples of this number of ``sources`` as the run wants them; None if no usable one is
    there."""
    folder = _folder(place, fingerprint)
    try:
        fs, path = open_place(folder)
        content = fs.cat_file(f"{path}/{INDEX}", start=0, end=_MOST_INDEX_BYTES)
        if blake3(content).digest() != fingerprint:
            raise ValueError("it is not the index that the run's members agree on")
        fields = json.loads(content)
        fields |= {name: tuple(fields.get(name, ())) for name in ("shards", "left_out", "parts")}
        if fields.pop("format") != FORMAT or fields["dtype"] not in _DTYPES:
            raise ValueError("it has another format")
        index = TokenIndex(**fields)
        _check(index, sequence_length, evaluation_fraction, sources, held_out_apart)
        return index
    except FileNotFoundError:
        return None
    except Exception as problem:  # whatever the file system raises
        log.warning("%s/%s cannot be used: %s", folder, INDEX, problem)
        return None


def _check(
    index: TokenIndex, sequence_length: int, evaluation_fraction: float, sources: int, held_out_apart: bool
) -> None:
    """Raises ValueError for values that no index of the run's data has. The fingerprint shows only that one member has made the
    index."""
    if (index.sequence_length, index.evaluation_fraction) != (sequence_length, evaluation_fraction):
        raise ValueError(
            f"it is of sequence_length {index.sequence_length!r:.40} and evaluation_fraction {index.evaluation_fraction!r:.40}, "
            f"the run's are {sequence_length} and {evaluation_fraction}"
        )
    if type(index.tokens) is not int or index.tokens < 1:
        raise ValueError(f"tokens is {index.tokens!r:.40}; it must be a whole number above 0")
    shards = math.ceil(index.tokens * np.dtype(index.dtype).itemsize / SHARD_BYTES)
    if len(index.shards) != shards or not all(isinstance(digest, str) for digest in index.shards):
        raise ValueError(f"shards has {len(index.shards)} entries; {index.tokens} tokens need the digests of {shards}")
    _check_parts(index, sources, held_out_apart)
    left_out = index.left_out
    if not all(type(window) is int and 0 <= window < index.windows for window in left_out):
        raise ValueError(f"left_out has entries that are no numbers of its {index.windows} windows")
    if any(one >= other for one, other in pairwise(left_out)):
        raise ValueError("left_out is not in ascending order")


def _check_parts(index: TokenIndex, sources: int, held_out_apart: bool) -> None:
    if len(index.parts or (index.tokens,)) != sources or index.held_out_apart is not held_out_apart:
        raise ValueError(
            f"parts has {len(index.parts)} entries, and held_out_apart is {index.held_out_apart!r:.40}; the run has {sources} "
            f"sources, {'one' if held_out_apart else 'none'} of them for held-out samples alone"
        )
    whole = all(type(part) is int and part > 0 for part in index.parts)
    if index.parts and (not whole or sum(index.parts) != index.tokens):
        raise ValueError(f"parts do not make its {index.tokens} tokens")


def fetch(place: str, index: TokenIndex, file: BinaryIO) -> blake3:
    """Writes all tokens into ``file``, each shard after its digest was checked. Returns the digest of all. Raises ValueError if
    a shard differs from the index, and the file system's exceptions."""
    folder = _folder(place, index.fingerprint)
    fs, path = open_place(folder)
    whole = blake3(max_threads=blake3.AUTO)
    for number, digest in enumerate(index.shards):
        _, size = index.shard(number)
        content = fs.cat_file(f"{path}/{_name(number)}", start=0, end=size)
        if len(content) != size or blake3(content, max_threads=blake3.AUTO).hexdigest() != digest:
            raise ValueError(f"{folder}/{_name(number)} is not what the run's members agree on")
        file.write(content)
        whole.update(content)
    return whole


def _folder(place: str, fingerprint: bytes) -> str:
    return f"{place.rstrip('/')}/data-{fingerprint.hex()[:32]}"


def _name(number: int) -> str:
    return f"tokens-{number:05d}.bin"

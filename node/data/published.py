"""A run's tokens beside its checkpoints: a newcomer fetches them instead of making them.

The tokens are in shards, with an index that has the digest of each shard. The index's own digest is the data's fingerprint. The
run's members agree on the fingerprint: so a node that knows it can check every byte that another node has written there.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, BinaryIO

import fsspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from dtfm.node.data.reaching import open_place
from dtfm.node.data.storage import write

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

    @property
    def windows(self) -> int:
        """The number of windows of sequence_length + 1 tokens. Each begins with the last token of the window before."""
        return (self.tokens - 1) // self.sequence_length

    @property
    def content(self) -> bytes:
        """The content of the index's file, the same on every node."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True).encode()

    @property
    def fingerprint(self) -> bytes:
        return blake3(self.content).digest()

    def shard(self, number: int) -> tuple[int, int]:
        """The first byte of a shard, and the number of its bytes."""
        start = number * SHARD_BYTES
        return start, min(SHARD_BYTES, self.tokens * np.dtype(self.dtype).itemsize - start)


def index_of(
    tokens: NDArray[Any], sequence_length: int, evaluation_fraction: float, left_out: tuple[int, ...] = ()
) -> TokenIndex:
    content = tokens.view(np.uint8).data
    shards = (content[start : start + SHARD_BYTES] for start in range(0, len(content), SHARD_BYTES))
    digests = tuple(blake3(shard, max_threads=blake3.AUTO).hexdigest() for shard in shards)
    return TokenIndex(
        tokens.dtype.str.replace("|", "<"), len(tokens), digests, sequence_length, evaluation_fraction, left_out
    )


def publish(place: str, index: TokenIndex, tokens: NDArray[Any]) -> None:
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
    content, written = tokens.view(np.uint8).data, 0
    for number in range(len(index.shards)):
        start, size = index.shard(number)
        if _size(fs, f"{path}/{_name(number)}") != size:
            write(folder, _name(number), content[start : start + size])
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


def find(place: str, fingerprint: bytes, sequence_length: int, evaluation_fraction: float) -> TokenIndex | None:
    """The index with this fingerprint, for samples as the run wants them; None if no usable one is there."""
    folder = _folder(place, fingerprint)
    try:
        fs, path = open_place(folder)
        content = fs.cat_file(f"{path}/{INDEX}", start=0, end=_MOST_INDEX_BYTES)
        if blake3(content).digest() != fingerprint:
            raise ValueError("it is not the index that the run's members agree on")
        fields = json.loads(content)
        fields |= {"shards": tuple(fields["shards"]), "left_out": tuple(fields["left_out"])}
        if fields.pop("format") != FORMAT or fields["dtype"] not in _DTYPES:
            raise ValueError("it has another format")
        index = TokenIndex(**fields)
        _check(index, sequence_length, evaluation_fraction)
        return index
    except FileNotFoundError:
        return None
    except Exception as problem:  # whatever the file system raises
        log.warning("%s/%s cannot be used: %s", folder, INDEX, problem)
        return None


def _check(index: TokenIndex, sequence_length: int, evaluation_fraction: float) -> None:
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
    left_out = index.left_out
    if not all(type(window) is int and 0 <= window < index.windows for window in left_out):
        raise ValueError(f"left_out has entries that are no numbers of its {index.windows} windows")
    if any(one >= other for one, other in pairwise(left_out)):
        raise ValueError("left_out is not in ascending order")


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

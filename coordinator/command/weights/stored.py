"""A safetensors file of a checkpoint: its header is read first, then its content once, from the beginning to the end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dtfm.coordinator.command.weights.formats import SIZES
from dtfm.coordinator.service.checkpoint.manifest import CheckpointError
from dtfm.protos.bucket_layout import LENGTH_BYTES, MOST_HEADER_BYTES, further_names

FIRST_BYTES = 1 << 16
"""Bytes of a file to read first, for its header, which mostly is shorter."""

PIECE_BYTES = 4 << 20
"""The most bytes of a file that are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor. ``dtype`` as safetensors names it. Its numbers are bytes [begin, end), counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A safetensors file of a checkpoint."""

    filesystem: Any
    """The file's filesystem (fsspec)."""
    path: str
    size: int
    """In bytes."""
    header: bytes
    """Without its length."""
    tensors: tuple[Tensor, ...]
    """In the order of their bytes. They cover the file from the end of the header."""

    @property
    def data_begin(self) -> int:
        return LENGTH_BYTES + len(self.header)

    @property
    def further_names(self) -> tuple[str, ...]:
        """See protos/bucket_layout.py. Raises CheckpointError."""
        try:
            return further_names(self.header)
        except (ValueError, AttributeError, TypeError) as problem:
            raise CheckpointError(f"{self.path} does not say what its tensor is called: {problem!r}") from None

    def pieces(self) -> Iterator[bytes]:
        """The whole file."""
        return pieces(self.filesystem, self.path)


def look_at(filesystem: Any, path: str, size: int, most_header_bytes: int = MOST_HEADER_BYTES) -> Stored:
    """The file with ``size`` bytes, by its header alone. Raises CheckpointError if it is no safetensors file."""
    begin = filesystem.cat_file(path, start=0, end=min(size, FIRST_BYTES))
    past = LENGTH_BYTES + int.from_bytes(begin[:LENGTH_BYTES], "little")
    if not LENGTH_BYTES < past <= min(size, LENGTH_BYTES + most_header_bytes):
        raise CheckpointError(f"{path} is not safetensors: its header cannot have {past - LENGTH_BYTES} bytes")
    if len(begin) < past:
        begin = filesystem.cat_file(path, start=0, end=past)
    header = bytes(begin[LENGTH_BYTES:past])
    return Stored(filesystem, path, size, header, tensors_of(header, size - past, path))


def tensors_of(header: bytes, data_bytes: int, path: str) -> tuple[Tensor, ...]:
    """The tensors that the header describes, of the ``data_bytes`` that follow it. Raises CheckpointError."""
    try:
        named = json.loads(header)
        tensors = [
            Tensor(name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in named.items()
            if name != "__metadata__"
        ]
        tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
        at = 0
        for tensor in tensors:
            whole = all(type(number) is int and number >= 0 for number in (*tensor.shape, tensor.begin, tensor.end))
            size = math.prod(tensor.shape) * SIZES[tensor.dtype]
            if not whole or tensor.begin != at or tensor.end != at + size:
                raise ValueError(f"{tensor.name} does not lie where it should")
            at = tensor.end
        if at != data_bytes:
            raise ValueError(f"{data_bytes} bytes follow, and {at} are described")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise CheckpointError(f"{path} is not safetensors: {problem}") from None
    return tuple(tensors)


def pieces(filesystem: Any, path: str) -> Iterator[bytes]:
    """The file's content, PIECE_BYTES at a time."""
    with filesystem.open(path, "rb", block_size=PIECE_BYTES) as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


class Cutter:
    """Cuts the bytes that follow a header, as they come, into pieces of whole numbers of the ``tensors``, and hands each piece
    to ``take``."""

    def __init__(self, tensors: tuple[Tensor, ...], take: Callable[[Tensor, memoryview], None]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.end > tensor.begin]
        self._take = take
        self._at = 0
        self._rest = b""  # the first bytes of a number whose others have not come

    def add(self, piece: memoryview) -> None:
        while len(piece):
            tensor = self._tensors[0]
            mine, piece = piece[: tensor.end - self._at], piece[tensor.end - self._at :]
            self._at += len(mine)
            known = memoryview(self._rest + bytes(mine)) if self._rest else mine
            whole = len(known) - len(known) % SIZES[tensor.dtype]
            self._rest = bytes(known[whole:])
            if whole:
                self._take(tensor, known[:whole])
            if self._at == tensor.end:
                self._tensors.pop(0)

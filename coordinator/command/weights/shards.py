"""Writes the weights of a checkpoint as transformers reads them: in one file, or in several with an index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from dtfm.coordinator.command.weights.converting import Change, converted
from dtfm.coordinator.command.weights.formats import FLOATS, SIZES, Format
from dtfm.coordinator.command.weights.stored import Cutter, Stored, Tensor
from dtfm.protos.bucket_layout import LENGTH_BYTES
from dtfm.protos.published_files import INDEX


@dataclass(frozen=True, slots=True)
class Part:
    """A file of the checkpoint, and which of its ``tensors`` are exported. ``check`` gets the whole file, piece by piece, and
    b"" at its end; it raises CheckpointError. ``keeps_formats``: its numbers are not converted. ``changed``: by tensor, what
    changes its numbers. ``replaced``: by tensor, a function that returns the bytes and the format of the numbers in place of its
    next ones, given how many these are."""

    stored: Stored
    tensors: tuple[Tensor, ...]
    check: Callable[[bytes], None]
    keeps_formats: bool = False
    changed: Mapping[str, Change] = field(default_factory=dict)
    replaced: Mapping[str, Callable[[int], tuple[bytes, str]]] = field(default_factory=dict)

    def format_of(self, tensor: Tensor, wanted: Format | None) -> str:
        return tensor.dtype if wanted is None or self.keeps_formats or tensor.dtype not in FLOATS else wanted.stored

    def bytes_of(self, tensor: Tensor, wanted: Format | None) -> int:
        return (tensor.end - tensor.begin) // SIZES[tensor.dtype] * SIZES[self.format_of(tensor, wanted)]


@dataclass(slots=True)
class Written:
    """By name, the BLAKE3 (hex) of each written file; and by tensor, how many of its numbers became infinite."""

    files: dict[str, str] = field(default_factory=dict)
    infinite: dict[str, int] = field(default_factory=dict)


def write_shards(
    parts: Sequence[Part], target: Path, wanted: Format | None, least_bytes: float, stem: str = "model"
) -> Written:
    """Writes one file, ``stem``.safetensors, or several files and the index that transformers reads. Each file has at least
    ``least_bytes``, except the last one. The numbers are in the format ``wanted``; None: in their own."""
    written, shards = Written(), list(_shards(parts, wanted, least_bytes))
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    names = [f"{stem}.safetensors"] if len(shards) == 1 else names
    found: dict[str, str] = {}
    size = 0
    for name, shard in zip(names, shards, strict=True):
        with (target / name).open("wb") as file:
            written.files[name] = _write(file, shard, wanted, written.infinite)
        for part in shard:
            found |= dict.fromkeys((tensor.name for tensor in part.tensors), name)
            size += sum(part.bytes_of(tensor, wanted) for tensor in part.tensors)
    if len(shards) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": found}
        (target / INDEX).write_text(json.dumps(index, indent=1))
    return written


def _shards(parts: Sequence[Part], wanted: Format | None, least_bytes: float) -> Iterator[list[Part]]:
    """The parts of each file to write. Formats are not mixed in a file, so that each number lies at a multiple of its size."""
    shard: list[Part] = []
    for part in parts:
        if shard and shard[-1].keeps_formats != part.keeps_formats:
            yield shard
            shard = []
        shard.append(part)
        if sum(each.bytes_of(tensor, wanted) for each in shard for tensor in each.tensors) >= least_bytes:
            yield shard
            shard = []
    if shard:
        yield shard


def _write(file: BinaryIO, shard: Sequence[Part], wanted: Format | None, infinite: dict[str, int]) -> str:
    """Writes the shard, and returns the BLAKE3 (hex) of its bytes."""
    digest = blake3()

    def put(data: bytes | memoryview) -> None:
        digest.update(data)
        file.write(data)

    put(_header(shard, wanted))
    for part in shard:
        exported = {tensor.name for tensor in part.tensors}

        def take(tensor: Tensor, data: memoryview, part: Part = part, exported: set[str] = exported) -> None:
            if tensor.name not in exported:
                return
            to, source, change = part.format_of(tensor, wanted), tensor.dtype, part.changed.get(tensor.name)
            given: bytes | memoryview = data
            if tensor.name in part.replaced:
                given, source = part.replaced[tensor.name](len(data) // SIZES[tensor.dtype])
            elif change is None and to == source:
                put(data)
                return
            made, lost = converted(given, source, to, change)
            if lost:
                infinite[tensor.name] = infinite.get(tensor.name, 0) + lost
            put(made)

        cutter, at = Cutter(part.stored.tensors, take), 0
        for piece in part.stored.pieces():
            part.check(piece)
            cutter.add(memoryview(piece)[max(0, part.stored.data_begin - at) : max(0, part.stored.size - at)])
            at += len(piece)
        part.check(b"")
    return digest.hexdigest()


def _header(shard: Sequence[Part], wanted: Format | None) -> bytes:
    """The header of the shard. The README of safetensors describes the format."""
    entries: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for part in shard:
        for tensor in part.tensors:
            end = begin + part.bytes_of(tensor, wanted)
            to = part.format_of(tensor, wanted)
            entries[tensor.name] = {"dtype": to, "shape": tensor.shape, "data_offsets": (begin, end)}
            begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(LENGTH_BYTES, "little") + text

"""Merges an adapter in the folder of peft with its model. To each adapted matrix the product of two small ones is added, a few
rows at a time. With DoRA each row then gets the length that was trained. Modules that were trained whole take the place of the
model's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from numpy.typing import NDArray

from dtfm.coordinator.command.weights.base import Base
from dtfm.coordinator.command.weights.converting import Change, numbers_of
from dtfm.coordinator.command.weights.formats import SIZES
from dtfm.coordinator.command.weights.older_names import as_before
from dtfm.coordinator.command.weights.shards import Part
from dtfm.coordinator.command.weights.stored import PIECE_BYTES, Stored, Tensor, look_at
from dtfm.coordinator.service.checkpoint.manifest import CheckpointError
from dtfm.protos.published_files import ADAPTER, ADAPTER_CONFIG, LENGTHS, PEFT

_LORA = ".lora_"
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
"""How peft ends the names of the two matrices beside a third."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What stands beside a matrix: a matrix [rank, columns] and one [rows, rank], and with DoRA the lengths of its rows."""

    down: Tensor
    up: Tensor
    lengths: Tensor | None


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in a folder of peft on this disk. ``is_transposed``: the model has its matrices as [columns, rows]. ``is_tied``:
    tensors that are one in the model stand under each name here."""

    stored: Stored
    scale: float
    is_transposed: bool
    is_tied: bool

    def whole(self) -> dict[str, Tensor]:
        """By their names in the model, the tensors of modules that were trained whole."""
        names = {tensor.name.removeprefix(PEFT): tensor for tensor in self.stored.tensors}
        return {name: tensor for name, tensor in names.items() if _LORA not in name}

    def matrices(self) -> dict[str, Beside]:
        """By the name of a matrix in the model, what stands beside it. Raises CheckpointError."""
        named = {tensor.name.removeprefix(PEFT): tensor for tensor in self.stored.tensors}
        found: dict[str, Beside] = {}
        for name, down in named.items():
            if not name.endswith(_DOWN):
                continue
            module = name.removesuffix(_DOWN)
            up, lengths = named.get(module + _UP), named.get(module + LENGTHS)
            if up is None or len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1]:
                raise CheckpointError(f"{self.stored.path}: {name} has no matrix beside it that it fits")
            if lengths is not None and lengths.shape != up.shape[:1]:
                raise CheckpointError(
                    f"{self.stored.path}: {module + LENGTHS} has not as many numbers as there are rows"
                )
            found[f"{module}.weight"] = Beside(down, up, lengths)
        if sum(2 + (each.lengths is not None) for each in found.values()) + len(self.whole()) != len(named):
            raise CheckpointError(f"{self.stored.path} has tensors that LoRA does not have; merge it with peft")
        return found

    def shape_beside(self, beside: Beside) -> tuple[int, int]:
        """The shape of the matrix, as the model has it."""
        rows, columns = beside.up.shape[0], beside.down.shape[1]
        return (columns, rows) if self.is_transposed else (rows, columns)

    def added(self, beside: Beside) -> Change:
        """Adds the product of the two small matrices. Reads both at the first call."""
        at, factors = 0, list[NDArray[Any]]()
        columns = self.shape_beside(beside)[1]

        def following(numbers: NDArray[Any]) -> NDArray[Any]:
            nonlocal at
            if not factors:
                a, b = self._read(beside.down), self._read(beside.up)
                factors.extend((a.T, b.T) if self.is_transposed else (b, a))
            left, right = factors
            count = len(numbers)
            first, past = at // columns, -(-(at + count) // columns)
            rows = (left[first:past] @ right) * left.dtype.type(self.scale)
            found: NDArray[Any] = numbers + rows.reshape(-1)[at - first * columns :][:count]
            at += count
            if past == len(left):
                factors.clear()
            return found

        return following

    def scaled(self, beside: Beside, lengths: Tensor, matrix: Callable[[int], Iterator[NDArray[Any]]]) -> Change:
        """Adds the product too, and then gives each row the length that was trained (DoRA). ``matrix``: reads the numbers of the
        model's matrix, the given number at a time."""
        add, at, factors = self.added(beside), 0, list[NDArray[Any]]()
        columns = self.shape_beside(beside)[1]

        def following(numbers: NDArray[Any]) -> NDArray[Any]:
            nonlocal at
            if not factors:
                with np.errstate(divide="ignore", invalid="ignore"):
                    factors.append(self._read(lengths) / self._lengths_before(beside, matrix))
            (factor,) = factors
            first, past = at // columns, -(-(at + len(numbers)) // columns)
            each = np.tile(factor, past - first) if self.is_transposed else np.repeat(factor[first:past], columns)
            found: NDArray[Any] = add(numbers) * each[at - first * columns :][: len(numbers)]
            at += len(numbers)
            return found

        return following

    def _lengths_before(self, beside: Beside, matrix: Callable[[int], Iterator[NDArray[Any]]]) -> NDArray[Any]:
        """The lengths of the rows of the model's matrix with the product added."""
        add, columns = self.added(beside), self.shape_beside(beside)[1]
        squares = list[NDArray[Any]]()
        for numbers in matrix(columns * max(1, PIECE_BYTES // (8 * columns))):
            of_piece = np.square(add(numbers).reshape(-1, columns), dtype=np.float64)
            squares.append(of_piece.sum(0) if self.is_transposed else of_piece.sum(1))
        whole: NDArray[Any] = np.sqrt(np.sum(squares, axis=0) if self.is_transposed else np.concatenate(squares))
        return whole.astype(np.float32)

    def in_place(self, tensor: Tensor) -> Callable[[int], tuple[bytes, str]]:
        """A function that returns the tensor's next numbers, given how many, and their format."""
        at = self.stored.data_begin + tensor.begin

        def following(count: int) -> tuple[bytes, str]:
            nonlocal at
            begin, at = at, at + count * SIZES[tensor.dtype]
            return self.stored.filesystem.cat_file(self.stored.path, start=begin, end=at), tensor.dtype

        return following

    def _read(self, tensor: Tensor) -> NDArray[Any]:
        begin = self.stored.data_begin
        content = self.stored.filesystem.cat_file(self.stored.path, start=begin + tensor.begin, end=begin + tensor.end)
        return np.frombuffer(content, {"F32": "<f4", "F64": "<f8"}[tensor.dtype]).reshape(tensor.shape)


def adapter_in(folder: Path) -> Adapter:
    """The adapter that an export has written into ``folder``. Raises CheckpointError."""
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        rank, alpha = config["r"], config["lora_alpha"]
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        transposed, tied = bool(config.get("fan_in_fan_out")), bool(config.get("ensure_weight_tying"))
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as problem:
        raise CheckpointError(f"{ADAPTER_CONFIG} of the checkpoint cannot be read: {problem!r}") from None
    file = folder / f"{ADAPTER}.safetensors"
    stored = look_at(fsspec.filesystem("file"), str(file), file.stat().st_size, most_header_bytes=file.stat().st_size)
    if any(tensor.dtype not in ("F32", "F64") for tensor in stored.tensors):
        raise CheckpointError(f"{file} has numbers in other formats than a run trains")
    return Adapter(stored, scale, transposed, tied)


def merged_parts(base: Base, adapter: Adapter) -> list[Part]:
    """The parts of the model's files, with the adapter added. Raises CheckpointError if it does not fit the model."""
    in_files = {
        tensor.name: (file, tensor)
        for file, names in zip(base.files, base.names, strict=True)
        for tensor in file.tensors
        if tensor.name in names
    }
    there = {name: tensor for name, (_, tensor) in in_files.items()}
    changed = _Changed()
    for name, beside in adapter.matrices().items():
        stored = _fitting(base, there, name, adapter.shape_beside(beside))
        if beside.lengths is None:
            changed.changed[stored] = adapter.added(beside)
        else:
            changed.changed[stored] = adapter.scaled(beside, beside.lengths, partial(_numbers, *in_files[stored]))
    whole = adapter.whole()
    found = {tensor.shape for name, tensor in whole.items() if _name_in(there, name) is not None}
    for name, tensor in whole.items():
        if adapter.is_tied and tensor.shape in found and _name_in(there, name) is None:
            continue  # the model has it under another name
        stored = _fitting(base, there, name, tensor.shape)
        changed.replaced[stored] = adapter.in_place(tensor)
    family = str(base.config.get("model_type", ""))
    return [_part(file, names, changed, family) for file, names in zip(base.files, base.names, strict=True)]


@dataclass(frozen=True, slots=True)
class _Changed:
    """As in Part, by the names in the model's files."""

    changed: dict[str, Change] = field(default_factory=dict)
    replaced: dict[str, Callable[[int], tuple[bytes, str]]] = field(default_factory=dict)


def _fitting(base: Base, there: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> str:
    """The name of the tensor in the model's files. Raises CheckpointError if there is none of this shape."""
    stored = _name_in(there, name)
    if stored is None or there[stored].shape != shape:
        what = "no tensor" if stored is None else f"a tensor of shape {list(there[stored].shape)}"
        raise CheckpointError(
            f"{base.name} has {what} for the adapter's {name} of shape {list(shape)}: its files have other names or shapes than "
            "transformers. Export without --merged, and merge where peft is installed: "
            "AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload()"
        )
    return stored


def _numbers(file: Stored, tensor: Tensor, at_a_time: int) -> Iterator[NDArray[Any]]:
    """The tensor's numbers, in at least 32 bits."""
    first, past = file.data_begin + tensor.begin, file.data_begin + tensor.end
    step = at_a_time * SIZES[tensor.dtype]
    for begin in range(first, past, step):
        numbers = numbers_of(
            file.filesystem.cat_file(file.path, start=begin, end=min(begin + step, past)), tensor.dtype
        )
        yield numbers.astype(np.promote_types(numbers.dtype, np.float32))


def _part(stored: Stored, names: frozenset[str], changed: _Changed, family: str) -> Part:
    tensors, exported = list[Tensor](), list[Tensor]()
    renamed = _Changed()
    for tensor in stored.tensors:
        made = as_before([tensor], family)
        tensors += made
        if tensor.name in names:
            exported += made
        if tensor.name in changed.changed:
            (only,) = made
            renamed.changed[only.name] = changed.changed[tensor.name]
        if tensor.name in changed.replaced:  # the bytes of the new names follow one another
            renamed.replaced.update(dict.fromkeys((each.name for each in made), changed.replaced[tensor.name]))
    every = replace(stored, tensors=tuple(tensors))
    return Part(every, tuple(exported), lambda _: None, changed=renamed.changed, replaced=renamed.replaced)


def _name_in(there: Mapping[str, Tensor], name: str) -> str | None:
    """The name under which the files have the tensor: mostly the same, or with more or less before it. None: none, or several."""
    if name in there:
        return name
    near = [each for each in there if each.endswith(f".{name}") or name.endswith(f".{each}")]
    return near[0] if len(near) == 1 else None

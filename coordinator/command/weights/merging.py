"""Merges an adapter in the folder of peft with its model. To each adapted matrix the product of two small ones is added, a few
rows at a time. Modules that were trained whole take the place of the model's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from numpy.typing import NDArray

from dtfm.coordinator.command.weights.base import Base
from dtfm.coordinator.command.weights.formats import SIZES
from dtfm.coordinator.command.weights.older_names import as_before
from dtfm.coordinator.command.weights.shards import Part
from dtfm.coordinator.command.weights.stored import Stored, Tensor, look_at
from dtfm.coordinator.service.checkpoint.adapter_file import PEFT
from dtfm.coordinator.service.checkpoint.manifest import CheckpointError
from dtfm.protos.published_files import ADAPTER, ADAPTER_CONFIG

_LORA = ".lora_"
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
"""How peft ends the names of the two matrices beside a third: [rank, columns] and [rows, rank]."""


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

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By the name of a matrix in the model, the two matrices beside it. Raises CheckpointError."""
        named = {tensor.name.removeprefix(PEFT): tensor for tensor in self.stored.tensors}
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for name, tensor in named.items():
            if not name.endswith(_DOWN):
                continue
            other = named.get(name.removesuffix(_DOWN) + _UP)
            if other is None or len(tensor.shape) != 2 or len(other.shape) != 2 or tensor.shape[0] != other.shape[1]:
                raise CheckpointError(f"{self.stored.path}: {name} has no matrix beside it that it fits")
            found[f"{name.removesuffix(_DOWN)}.weight"] = tensor, other
        if 2 * len(found) + len(self.whole()) != len(named):
            raise CheckpointError(f"{self.stored.path} has tensors that LoRA does not have; merge it with peft")
        return found

    def shape_beside(self, down: Tensor, up: Tensor) -> tuple[int, int]:
        """The shape of the matrix beside which these two stand."""
        rows, columns = up.shape[0], down.shape[1]
        return (columns, rows) if self.is_transposed else (rows, columns)

    def product(self, down: Tensor, up: Tensor) -> Callable[[int], NDArray[Any]]:
        """A function that returns the next numbers of their product, given how many. It reads both at the first call."""
        at, factors = 0, list[NDArray[Any]]()
        columns = self.shape_beside(down, up)[1]

        def following(count: int) -> NDArray[Any]:
            nonlocal at
            if not factors:
                a, b = self._read(down), self._read(up)
                factors.extend((a.T, b.T) if self.is_transposed else (b, a))
            left, right = factors
            first, past = at // columns, -(-(at + count) // columns)
            rows = (left[first:past] @ right) * left.dtype.type(self.scale)
            found: NDArray[Any] = rows.reshape(-1)[at - first * columns :][:count]
            at += count
            if past == len(left):
                factors.clear()
            return found

        return following

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
    beside = adapter.pairs()
    there = {
        tensor.name: tensor
        for file, names in zip(base.files, base.names, strict=True)
        for tensor in file.tensors
        if tensor.name in names
    }
    changed = _Changed()
    for name, pair in beside.items():
        stored = _fitting(base, there, name, adapter.shape_beside(*pair))
        changed.added[stored] = adapter.product(*pair)
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

    added: dict[str, Callable[[int], Any]] = field(default_factory=dict)
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


def _part(stored: Stored, names: frozenset[str], changed: _Changed, family: str) -> Part:
    tensors, exported = list[Tensor](), list[Tensor]()
    renamed = _Changed()
    for tensor in stored.tensors:
        made = as_before([tensor], family)
        tensors += made
        if tensor.name in names:
            exported += made
        if tensor.name in changed.added:
            (only,) = made
            renamed.added[only.name] = changed.added[tensor.name]
        if tensor.name in changed.replaced:  # the bytes of the new names follow one another
            renamed.replaced.update(dict.fromkeys((each.name for each in made), changed.replaced[tensor.name]))
    every = replace(stored, tensors=tuple(tensors))
    return Part(every, tuple(exported), lambda _: None, added=renamed.added, replaced=renamed.replaced)


def _name_in(there: Mapping[str, Tensor], name: str) -> str | None:
    """The name under which the files have the tensor: mostly the same, or with more or less before it. None: none, or several."""
    if name in there:
        return name
    near = [each for each in there if each.endswith(f".{name}") or name.endswith(f".{each}")]
    return near[0] if len(near) == 1 else None

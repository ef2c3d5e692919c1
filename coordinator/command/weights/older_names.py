"""Experts' weights under their old names.

transformers 5 has all experts of a layer in one tensor. transformers 4, vLLM and llama.cpp's converter look for one tensor of
each expert. The bytes lie in the same order, so only names and shapes differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from dtfm.coordinator.command.weights.formats import SIZES
from dtfm.coordinator.command.weights.stored import Tensor

_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
"""How the names of experts' tensors end: [experts, 2 * inner, hidden], the gate's rows first, and [experts, hidden, inner]."""


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of an expert's gate, its way up and its way down. ``renamed``: parts of names, with their new and their old
    text."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renamed: tuple[tuple[str, str], ...] = ()


_NUMBERED = _Names("w1", "w3", "w2")
_BLOCK = (".mlp.", ".block_sparse_moe.")
_FAMILIES = {
    **dict.fromkeys(
        (
            "deepseek_v2",
            "deepseek_v3",
            "dots1",
            "flex_olmo",
            "glm4_moe",
            "hunyuan_v1_moe",
            "jamba",
            "olmoe",
            "qwen2_moe",
            "qwen3_moe",
            "qwen3_next",
        ),
        _Names(),
    ),
    "ernie4_5_moe": _Names(renamed=((".mlp.gate.moe_statics.", ".mlp.moe_statics."),)),
    "lfm2_moe": _NUMBERED,
    "minimax": replace(_NUMBERED, renamed=(_BLOCK,)),
    "mixtral": replace(_NUMBERED, renamed=(_BLOCK,)),
    "phimoe": replace(_NUMBERED, renamed=((".router.weight", ".gate.weight"), _BLOCK)),
}
"""By family (``model_type``). Other families have the same names in all releases, or did not exist in earlier ones."""


def family_in(folder: Path) -> str:
    """The family that the folder's config.json names; empty: none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""


def as_before(tensors: Iterable[Tensor], family: str) -> tuple[Tensor, ...]:
    """The same bytes as tensors that all releases know."""
    names = _FAMILIES.get(family)
    if names is None:
        return tuple(tensors)
    return tuple(part for tensor in tensors for part in _parts(tensor, names))


def _parts(tensor: Tensor, names: _Names) -> list[Tensor]:
    is_up, is_down = tensor.name.endswith(_UP), tensor.name.endswith(_DOWN)
    if len(tensor.shape) != 3 or not (is_up or is_down) or (is_up and tensor.shape[1] % 2):
        return [replace(tensor, name=_renamed(tensor.name, names))]
    experts, rows, columns = tensor.shape
    stem = tensor.name.removesuffix(_UP if is_up else _DOWN) + ".experts"
    each = (names.gate, names.up) if is_up else (names.down,)
    shape, found, at = (rows // len(each), columns), list[Tensor](), tensor.begin
    for expert in range(experts):
        for name in each:
            end = at + math.prod(shape) * SIZES[tensor.dtype]
            whole = _renamed(f"{stem}.{expert}.{name}.weight", names)
            found.append(Tensor(whole, tensor.dtype, shape, at, end))
            at = end
    return found


def _renamed(name: str, names: _Names) -> str:
    for now, before in names.renamed:
        name = name.replace(now, before)
    return name

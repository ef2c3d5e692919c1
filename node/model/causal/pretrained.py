"""Reads a model's initial values from a folder of weights: which stored tensors make which parameters, as transformers loads
them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from dtfm.node.model.causal.weight_files import WeightFiles
from dtfm.node.model.model import canonical_names

_SHOWN = 3
_CONSTANTS = re.compile(r"\.(inv_freq|masked_bias|attn\.bias|attention\.bias)$")
"""Constants that old files have among the weights. Every node computes them."""


@dataclass(slots=True)
class _Made:
    """Stored tensors that transformers makes one or several parameters from. ``first`` is the first of these parameters.
    ``stored`` are the tensors' names, by the pattern of ``transform`` that they match, in transformers' order."""

    first: str
    transform: WeightConverter | WeightRenaming
    stored: dict[str, list[str]] = field(default_factory=dict)

    def make(self, module: PreTrainedModel, tensor: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        transform = copy.deepcopy(self.transform)
        for pattern, names in self.stored.items():
            for name in names:
                # As transformers does when it saves.
                transform.add_tensor(self.first, name, pattern, cast(Any, tensor(name)))
        made = transform.convert(self.first, model=module, config=module.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class Pretrained:
    """The values of the parameters of ``module``, which may be on meta."""

    def __init__(self, files: WeightFiles, module: PreTrainedModel) -> None:
        """Gives the module the constants that the files have (Model.constants), and reads no other tensor. Raises ValueError if
        the files lack a tensor that the module needs, or have it in another shape."""
        self._files, self._module = files, module
        self._of: dict[str, _Made] = {}
        parameters = dict(module.named_parameters(remove_duplicate=False))
        known: dict[str, torch.Tensor] = {**dict(module.named_buffers()), **parameters}
        unknown: list[str] = []
        for made in _assigned(files, module, unknown):
            for name, value in self._tried(made).items():
                if name not in known:
                    unknown.append(name)
                elif value.shape != known[name].shape:
                    raise self._wrong(
                        f"{name} has shape {list(value.shape)} there, but {list(known[name].shape)} by its own config.json",
                        "the files are of different models; copy the folder again",
                    )
                else:
                    self._of[name] = made
        if unknown:
            raise self._wrong(
                f"{type(module).__name__} does not train {_some(unknown)}, by its config.json",
                "the files are of another model, or of a newer transformers; copy the folder again, or update transformers",
            )
        self._names: dict[str, list[str]] = {}
        canonical = canonical_names(module)
        for name, parameter in parameters.items():
            self._names.setdefault(canonical[id(parameter)], []).append(name)
        missing = [first for first, names in self._names.items() if self._of.keys().isdisjoint(names)]
        if missing:
            raise self._wrong(
                f"{_some(missing)} {'is' if len(missing) == 1 else 'are'} missing", "copy the folder again"
            )
        for name in self._of.keys() - parameters.keys():
            known[name].copy_(self._of[name].make(module, self._files.read)[name])

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The values of parameters, float32 (or float64, as stored) on the CPU. ``names``: the first ones of tied parameters.
        Reads only the tensors that make these parameters. Raises ValueError if a tensor cannot be read."""
        values: dict[str, torch.Tensor] = {}
        for first in names:
            if first in values:
                continue
            stored = [name for name in self._names[first] if name in self._of]
            for name in stored:
                if name not in values:
                    values |= self._of[name].make(self._module, self._tensor)
            if any(not torch.equal(values[name], values[stored[0]]) for name in stored):
                raise self._wrong(
                    f"{' and '.join(stored)} differ, but by its config.json they are one parameter",
                    "set tie_word_embeddings = false in its config.json",
                )
            values[first] = values[stored[0]]
        return values

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._files.read(name)
        return tensor if tensor.dtype == torch.float64 else tensor.float()

    def _tried(self, made: _Made) -> dict[str, torch.Tensor]:
        """The parameters that the shapes alone make, on meta."""

        def shape_of(name: str) -> torch.Tensor:
            return torch.empty(self._files.tensors[name].shape, device="meta")

        try:
            return made.make(self._module, shape_of)
        except Exception as problem:  # whatever transformers raises
            several = [name for names in made.stored.values() for name in names]
            raise self._wrong(
                f"transformers does not make {made.first} of {_some(several)} ({problem})", "copy the folder again"
            ) from problem

    def _wrong(self, what: str, fix: str) -> ValueError:
        return ValueError(f"model.pretrained: {self._files.name}: {what}; {fix}")


def _assigned(files: WeightFiles, module: PreTrainedModel, unknown: list[str]) -> list[_Made]:
    """Which stored tensors become which parameters, as transformers' `convert_and_load_state_dict_in_model` assigns them. Adds
    to ``unknown`` the names that it does not know and would not ignore."""
    mapping = get_model_conversion_mapping(module)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = module.state_dict(), module.base_model_prefix
    ignored = [*(module._keys_to_ignore_on_load_unexpected or ()), _CONSTANTS]
    found: dict[str, _Made] = {}
    for name in sorted(files.tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            if not any(re.search(each, name) for each in ignored):
                unknown.append(name)
            continue
        transform = by_pattern[pattern] if pattern is not None else WeightRenaming(name, target)
        made = found.setdefault(target, _Made(target, transform))
        made.stored.setdefault(pattern if pattern is not None else name, []).append(name)
    return list(found.values())


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")

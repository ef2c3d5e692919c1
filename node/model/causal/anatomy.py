"""Finds where a causal language model can be cut, by following one forward pass without computing it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from dtfm.node.data.samples import Sample
from dtfm.node.model.model import Layer, fake_parameters

_BATCH = 2


class NotSeparable(Exception):
    """The model is more than an embedding, a chain of decoder layers and a head."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Where a model can be cut. ``decoder`` is the name of the list of decoder layers. ``returns_tuple``: they return (hidden
    states, ...). ``separate_head``: the modules after the decoder read its output alone, token by token."""

    decoder: str
    layers: tuple[Layer, ...]
    returns_tuple: bool
    separate_head: bool = False


def dissect(module: PreTrainedModel, sample: Sample) -> Anatomy:
    """The layers of ``module``: embedding, decoder layers, head.

    Attention counts as its two matrix products, whatever kernel computes it.

    Raises:
        NotSeparable, and any exception of the model's own forward.
    """
    whole = copy.deepcopy(module)
    whole.config._attn_implementation = "eager"
    whole.config._experts_implementation = "batched_mm"  # the only one whose shapes do not depend on values
    decoder = _decoder_name(whole)
    walk = _Walk(whole, decoder, sample)
    # Fake tensors on the CPU, not meta tensors: transformers then skips checks that read values.
    with FakeTensorMode(allow_non_fake_inputs=True), walk.counter:
        fake_parameters(whole)
        whole(input_ids=torch.zeros(_BATCH, *sample.shape, dtype=torch.int64), use_cache=False)
    return Anatomy(decoder, _layers(whole, decoder, sample, walk.users, walk.costs()), walk.returns_tuple)


def hidden_of(output: Any) -> torch.Tensor:
    """The hidden states in a decoder layer's output."""
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


class _Walk:
    """Hooks that watch one forward pass.

    ``users`` has each module outside the decoder layers with parameters of its own, by name. The value is the numbers of the
    layers (0: embedding, count + 1: head) that call it.
    """

    def __init__(self, whole: PreTrainedModel, decoder: str, sample: Sample) -> None:
        chain = whole.get_submodule(decoder)
        assert isinstance(chain, nn.ModuleList)
        self.users: dict[str, set[int]] = {}
        self.returns_tuple = False
        self.counter = FlopCounterMode(display=False)
        self._chain, self._shape = chain, (_BATCH, *sample.shape)
        self._at, self._inside = 0, False  # number of the last decoder layer entered, and whether it is still running
        self._marks: list[int] = []  # operations counted so far, at the entry of the first layer and the exit of each
        for name, part in whole.named_modules(remove_duplicate=False):
            if not name.startswith(f"{decoder}.") and next(part.parameters(recurse=False), None) is not None:
                part.register_forward_pre_hook(lambda _part, _args, name=name: self._called(name))
        for layer in chain:
            layer.register_forward_pre_hook(self._enter, with_kwargs=True)
            layer.register_forward_hook(self._leave)

    def costs(self) -> list[float]:
        """FLOPs per layer for one sample, after the pass."""
        if len(self._marks) != len(self._chain) + 1:
            raise NotSeparable(f"{self._at} of its {len(self._chain)} layers were called")
        marks = [0, *self._marks, self.counter.get_total_flops()]
        return [(end - begin) / _BATCH for begin, end in pairwise(marks)]

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        if self._at == len(self._chain) or layer is not self._chain[self._at]:
            raise NotSeparable("its layers are not called one after another")
        if self._at == 0:
            self._marks.append(self.counter.get_total_flops())
        self._at, self._inside = self._at + 1, True
        others = pytree.tree_leaves((args[1:], {k: v for k, v in keywords.items() if args or k != "hidden_states"}))
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in others):
            raise NotSeparable("more than hidden states flows between its layers")

    def _leave(self, _layer: nn.Module, _args: object, output: Any) -> None:
        self._marks.append(self.counter.get_total_flops())
        self._inside, self.returns_tuple = False, isinstance(output, tuple)
        hidden = hidden_of(output)
        if not isinstance(hidden, torch.Tensor) or hidden.shape[:-1] != self._shape:
            raise NotSeparable("its layers do not return hidden states")

    def _called(self, name: str) -> None:
        if self._inside or 0 < self._at < len(self._chain):
            raise NotSeparable(f"{name} is used in or between its layers, and belongs to none")
        self.users.setdefault(name, set()).add(len(self._chain) + 1 if self._at else 0)


def _decoder_name(module: PreTrainedModel) -> str:
    """The name of the outermost list with as many modules as the config has layers."""
    count: int = module.config.num_hidden_layers
    lists: list[str] = [n for n, m in module.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    depth = min((name.count(".") for name in lists), default=0)
    lists = [name for name in lists if name.count(".") == depth]
    if len(lists) != 1:
        raise NotSeparable(f"it has {len(lists)} lists of {count} layers")
    return lists[0]


def _layers(
    whole: PreTrainedModel, decoder: str, sample: Sample, users: Mapping[str, set[int]], costs: list[float]
) -> tuple[Layer, ...]:
    """Assigns every parameter to the layers that use it."""
    count = len(costs) - 2
    roots: list[list[str]] = [[], *([f"{decoder}.{number}"] for number in range(count)), []]
    for name, part in whole.named_modules(remove_duplicate=False):
        if not name.startswith(f"{decoder}.") and next(part.parameters(recurse=False), None) is not None:
            around = not name or decoder.startswith(f"{name}.")
            if around or name not in users:
                raise NotSeparable(f"{name or 'the model'} has parameters, but no layer of its own")
            for number in users[name]:
                roots[number].append(name)
    hidden, vocabulary = whole.config.hidden_size, whole.config.vocab_size
    names = ["embedding", *(f"layer {number}" for number in range(1, count + 1)), "head"]
    widths = [hidden] * (count + 1) + [vocabulary]
    return tuple(
        Layer(name, _parameters(whole, mine), tuple(mine), (*sample.shape, width), cost)
        for name, mine, width, cost in zip(names, roots, widths, costs, strict=True)
    )


def _parameters(whole: nn.Module, roots: list[str]) -> tuple[str, ...]:
    return tuple(
        f"{root}.{name}"
        for root in roots
        for name, _ in whole.get_submodule(root).named_parameters(remove_duplicate=False)
    )

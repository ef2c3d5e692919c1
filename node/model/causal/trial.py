"""Tries each kind of decoder layer with numbers, on the CPU.

Following a model on tensors without values (see anatomy) does not show whether a layer sees the tokens that come after, nor
whether it can be computed apart from the others. A model that sees the next token learns to copy it, and nobody is told.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from dtfm.node.model.causal.anatomy import Anatomy
from dtfm.node.model.causal.slice import Slice

_TOKENS = 4
"""Few, so that a layer with many experts reads few of them."""
_NOISE = 1e-3
"""A change of earlier tokens counts if it is more than this part of the last token's own. The experts of the two samples get
batches of other sizes, and matrix products of another size round differently."""

_DRAWN = 1_000_003
"""Random numbers that are drawn, and then repeated: a prime, so that no two rows of a matrix are the same."""


class SeesTheFuture(Exception):
    """The output of a layer changes with tokens that come after it; the message is the layer's name."""


def try_layers(module: PreTrainedModel, anatomy: Anatomy) -> None:
    """Computes one layer of each kind forward and backward, for two samples that differ in their last token. Changes nothing.
    Takes the memory of the layer's largest parameter for a while.

    Raises:
        SeesTheFuture, and any exception of the model's own forward.
    """
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, _TOKENS, module.config.hidden_size, generator=generator).repeat(2, 1, 1)
    hidden[1, -1] = torch.randn(module.config.hidden_size, generator=generator)
    for number in _one_of_each_kind(module, anatomy):
        whole = copy.deepcopy(module)
        whole.config._experts_implementation = "eager"  # reads the experts that it needs alone
        _fill(whole.get_submodule(f"{anatomy.decoder}.{number - 1}"), module.config.hidden_size, generator)
        given = hidden.clone().requires_grad_()
        found = Slice(whole, anatomy, number, number + 1).body(given)
        torch.autograd.grad(found.sum(), given)
        difference = (found[1] - found[0]).detach().abs().amax(-1)
        if difference[:-1].max() > _NOISE * difference[-1]:
            raise SeesTheFuture(anatomy.layers[number].name)


def _one_of_each_kind(module: PreTrainedModel, anatomy: Anatomy) -> Iterator[int]:
    """The number of the first decoder layer of each kind."""
    chain, seen = module.get_submodule(anatomy.decoder), set[tuple[str, object]]()
    kinds = getattr(module.config, "layer_types", None)
    assert isinstance(chain, nn.ModuleList)
    for number, layer in enumerate(chain, start=1):
        kind = (str(layer), kinds[number - 1] if isinstance(kinds, list) and len(kinds) == len(chain) else None)
        if kind not in seen:
            seen.add(kind)
            yield number


def _fill(layer: nn.Module, width: int, generator: torch.Generator) -> None:
    """Replaces the layer's parameters by ones with values. They share memory: that of the largest matrix."""
    shapes = {id(p): p.shape[1:] if _is_stack(p) else p.shape for p in layer.parameters()}
    most = max((math.prod(shape) for shape in shapes.values()), default=0)
    numbers = torch.randn(min(_DRAWN, most), generator=generator) * width**-0.5
    matrix = numbers.repeat(-(-most // max(len(numbers), 1)))[:most]
    for part in layer.modules():
        for name, old in part._parameters.items():
            if old is not None:
                shape = shapes[id(old)]
                new = matrix[: math.prod(shape)].view(shape)
                # One-dimensional: factors of norms, biases.
                part._parameters[name] = nn.Parameter(new.expand(old.shape) if old.ndim > 1 else new + 1)


def _is_stack(parameter: nn.Parameter) -> bool:
    """Whether it is the matrices of many experts, which are then all the same."""
    return parameter.ndim > 2 and parameter.numel() > _DRAWN

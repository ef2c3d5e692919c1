"""Which models can be cut into layers, and which cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dtfm.node.model.causal.anatomy import NotSeparable, dissect
from tests.node.model.test_stage import model_of


class Scaled(nn.Module):
    """Another module's outputs, times a parameter."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(1, device="meta"))

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return tuple(x * self.scale for x in self.inner(*args, **keywords))


class After(nn.Module):
    """A layer whose input goes through another module first."""

    def __init__(self, first: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = first, layer

    def forward(self, hidden_states: torch.Tensor, **keywords: Any) -> Any:
        hidden_states = self.first(hidden_states, **keywords)
        return self.layer(hidden_states, **keywords)


class Plain(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        return self.norm(hidden_states)


def learned_rotary(llama: Any) -> None:
    """All layers read values that one of them would have to train."""
    llama.model.rotary_emb = Scaled(llama.model.rotary_emb)


def free_parameter(llama: Any) -> None:
    llama.model.register_parameter("shift", nn.Parameter(torch.ones(1, device="meta")))


def norm_used_twice(llama: Any) -> None:
    llama.model.layers[1] = After(Plain(llama.model.norm), llama.model.layers[1])


def layer_used_twice(llama: Any) -> None:
    llama.model.layers[1] = After(llama.model.layers[2], llama.model.layers[1])


def pooling_layer(llama: Any) -> None:
    llama.model.layers[2].forward = lambda hidden_states, **_: hidden_states.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (learned_rotary, "more than hidden states flows between its layers"),
        (free_parameter, "model has parameters, but no layer of its own"),
        (norm_used_twice, "model.norm is used in or between its layers"),
        (layer_used_twice, "its layers are not called one after another"),
        (pooling_layer, "its layers do not return hidden states"),
    ],
)
def test_a_model_that_is_not_a_chain_of_layers_is_not_cut(change: Callable[[Any], None], complaint: str) -> None:
    model = model_of("llama")
    module: Any = copy.deepcopy(model.module)
    assert dissect(module, model.sample).layers == model.layers
    change(module)
    with pytest.raises(NotSeparable, match=complaint):
        dissect(module, model.sample)

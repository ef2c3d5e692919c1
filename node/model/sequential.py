"""Models given as an nn.Sequential. Each child is a layer."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.flop_counter import FlopCounterMode

from dtfm.node.data.samples import Sample
from dtfm.node.model.compiled_layer import compiled
from dtfm.node.model.model import Layer, Model, Part, computed_again, parameters_on_meta, weakly


class SequentialModel(Model):
    """``path`` is the "package.module:function" that returned the model. ``changing`` are the layers that change their input in
    place. These get a copy: another stage may have sent the input, or a layer that is computed again may need it later."""

    def __init__(
        self, module: nn.Sequential, sample: Sample, layers: tuple[Layer, ...], path: str, changing: frozenset[int]
    ) -> None:
        super().__init__(module, sample, layers)
        self.path = path
        self._changing = changing

    def cut(self, module: nn.Module, first: int, past_last: int, checkpointed: bool = False) -> Part:
        assert isinstance(module, nn.Sequential)
        for number in range(first, past_last):
            if self.compiles:
                module[number].forward = weakly(compiled(module[number].forward))
            if number in self._changing:
                module[number].forward = _with_copy(weakly(module[number].forward))
            if checkpointed and number < len(self.layers) - 1:  # after the last one its backward pass follows directly
                module[number].forward = computed_again(weakly(module[number].forward))
        if past_last == len(self.layers) and isinstance(module[-1], nn.Linear):
            return Part(module[first:-1], module[-1])
        return Part(module[first:past_last])

    def layerwise(self, module: nn.Module) -> Iterator[Part]:
        return (self.cut(module, number, number + 1) for number in range(len(self.layers)))

    def initialise_module(self, module: nn.Module) -> None:
        reset = _reset(module)
        if reset is not None:
            reset()

    def save_config(self, folder: Path, dtype: torch.dtype, special_ids: Mapping[str, int]) -> None:
        text = json.dumps({"module": self.path, "dtype": str(dtype).removeprefix("torch.")}, indent=2)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def load_sequential(make: Callable[[], Any], path: str, sample: Sample) -> SequentialModel:
    """The model that ``make`` (named ``path``) returns.

    Raises:
        ValueError: ``make`` fails, or returns something that nodes cannot share: no nn.Sequential, running statistics, dropout,
        parameters without reset_parameters(), layers that do not map one batch of numbers to another.
    """
    if sample.isolated:
        raise ValueError(
            'data.isolate_documents: a model of one\'s own (model.family = "module") gets no positions; leave it out'
        )
    try:
        with parameters_on_meta():
            module = make()
    except Exception as problem:
        raise ValueError(f"model.module: {path} failed: {type(problem).__name__}: {problem}") from problem
    if not isinstance(module, nn.Sequential) or not len(module):
        raise ValueError(f"model.module: {path} returned {type(module).__name__}, not an nn.Sequential with children")
    for name, part in module.named_modules():
        _check(name, part, path)
    layers, changing = _trace(module, sample, path)
    return SequentialModel(module, sample, layers, path, changing)


def _check(name: str, part: nn.Module, path: str) -> None:
    kind = type(part).__name__
    if isinstance(part, _NormBase) and part.track_running_stats:
        raise ValueError(
            f"model.module: {path} has {kind} at {name!r}, whose running statistics would differ between the nodes; "
            "use GroupNorm, or give it track_running_stats=False"
        )
    if isinstance(part, _DropoutNd) and part.p > 0:
        raise ValueError(f"model.module: {path} has {kind}(p={part.p}) at {name!r}; dropout is not supported, use p=0")
    if next(part.parameters(recurse=False), None) is not None and _reset(part) is None:
        raise ValueError(
            f"model.module: {path} has a {kind} at {name!r} with parameters but without reset_parameters(), so that "
            "nodes could not initialise them; add that method"
        )


def _reset(part: nn.Module) -> Callable[[], None] | None:
    return getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)


def _with_copy(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: forward(x.clone())


def _trace(module: nn.Sequential, sample: Sample, path: str) -> tuple[tuple[Layer, ...], frozenset[int]]:
    """The layers, and the numbers of the layers that change their input. Found by running two samples on the meta device."""
    batch = 2
    x = torch.empty(batch, *sample.shape, dtype=sample.dtype, device="meta")
    layers, changing = list[Layer](), set[int]()
    for name, child in copy.deepcopy(module).to("meta").named_children():
        given, before, version = tuple(x.shape), x, x._version
        try:
            with FlopCounterMode(display=False) as counter:
                x = child(x)
        except Exception as problem:
            raise ValueError(
                f"model.module: layer {name!r} of {path} does not take an input of shape {given}: {problem}"
            ) from problem
        if before._version != version:
            changing.add(len(layers))
        if not (isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim and x.shape[0] == batch):
            raise ValueError(
                f"model.module: layer {name!r} of {path} must return one floating-point tensor with the batch first, "
                f"but for an input of shape {given} it returned {tuple(x.shape) if isinstance(x, torch.Tensor) else type(x)}"
            )
        parameters = tuple(f"{name}.{p}" for p, _ in child.named_parameters(remove_duplicate=False))
        flops = counter.get_total_flops() / batch
        layers.append(Layer(name, parameters, (name,), tuple(x.shape[1:]), flops))
    return tuple(layers), frozenset(changing)

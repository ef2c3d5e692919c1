"""The whole model without its weights: layers, buckets, shapes, costs."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.checkpoint import checkpoint

from dtfm.node.data.samples import Sample
from dtfm.node.model.bucket import BucketSpec
from dtfm.node.model.dropout import dropping_again
from dtfm.node.model.frozen import FrozenWeights
from dtfm.node.model.initial_values import initial_values
from dtfm.protos.plan_pb2 import MUON, Optimizer

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """A stage's computation."""

    body: Callable[..., torch.Tensor]
    """Maps token ids or hidden states to hidden states, batch first. If samples are isolated, it also takes ``positions`` int64
    [b, s] (Data.positions)."""
    head: Forward | None = None
    """On the last stage, maps hidden states [tokens, hidden] to logits, each token by itself. None: the body's output are the
    logits."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer."""

    name: str
    parameters: tuple[str, ...]
    """The full state-dict names that the layer uses."""
    roots: tuple[str, ...]
    """The submodules that contain its parameters."""
    output: tuple[int, ...]
    """The shape of its output without the batch."""
    flops: float
    """Its forward FLOPs for one sample."""


class Model(ABC):
    """A model whose parameters are on the meta device, so that it takes no memory.

    Buffers are real. They are constants (rotary frequencies, masks) that every node computes, not state.
    """

    def __init__(self, module: nn.Module, sample: Sample, layers: tuple[Layer, ...]) -> None:
        self.module = module
        self.sample = sample
        self.layers = layers
        self.buckets = _buckets(module, layers)
        self.frozen = FrozenWeights()
        self.compiles = False  # the layers of stages that are cut from now on

    def set_momentum(self, has_momentum: bool) -> None:
        """Whether exchanges of islands have momentum in this run."""
        self.buckets = tuple(replace(spec, has_momentum=has_momentum) for spec in self.buckets)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """What updates the model's parameters in this run: Muon takes the matrices of layers between the first and the last."""
        last = len(self.layers) - 1
        inner = [len(spec.layers) == 1 and 0 < spec.layers[0] < last for spec in self.buckets]
        self.buckets = tuple(
            replace(
                spec,
                orthogonal=frozenset(
                    name
                    for name, shape in spec.parameters
                    if optimizer == MUON and is_inner and len(shape) == 2 and name not in spec.kept
                ),
            )
            for spec, is_inner in zip(self.buckets, inner, strict=True)
        )

    @abstractmethod
    def cut(self, module: nn.Module, first: int, past_last: int, checkpointed: bool = False) -> Part:
        """The computation of layers [first, past_last) of ``module``. ``module`` is a copy of ``self.module`` with real
        parameters at least for these layers. May change the copy. If ``checkpointed``, layers are `computed_again`."""

    @abstractmethod
    def layerwise(self, module: nn.Module) -> Iterator[Part]:
        """The computation of each layer of ``module``, a copy of ``self.module``, one at a time: use each before the next. May
        change the copy."""

    def weights_fingerprint(self, seed: int) -> bytes:
        """A fingerprint of the model's initial weights: 32 bytes of their description, and 32 of values that ``seed`` picks.
        Empty if the weights follow from the seed. Raises ValueError if they cannot be read."""
        return b""

    def keep_frozen_in(self, folder: Path, seed: int, authority: bytes) -> None:  # noqa: B027  # most models have none
        """From now on keeps frozen weights in ``folder`` on this machine's disk, unless they are as near already. ``seed`` is the
        run's, and ``authority`` its coordinator's certificate. Raises ValueError if the weights cannot be read."""

    def buffer_dtype(self, computes_in: torch.dtype) -> torch.dtype:
        """The dtype of buffers with floating-point numbers in a stage that computes in ``computes_in``."""
        return computes_in

    @abstractmethod
    def initialise_module(self, module: nn.Module) -> None:
        """Sets one submodule's parameters by the model's own rules."""

    @abstractmethod
    def save_config(self, folder: Path, dtype: torch.dtype, special_ids: Mapping[str, int]) -> None:
        """Writes the description of the architecture that goes with exported weights into a local folder. ``special_ids``: of
        the run's tokenizer (see Tokenizer)."""

    def backward_flops(self, layer: int) -> float:
        """The FLOPs of a layer's backward pass for one sample: of the gradient of its input as many as forward, and of the
        gradients of the matrices that are trained. Embeddings are no products, and cost nothing."""
        forward = self.layers[layer].flops
        if not self.frozen:
            return 2 * forward
        tokens = math.prod(self.layers[layer].output[:-1])
        trained = sum(
            math.prod(shape)
            for spec in self.buckets
            if layer in spec.layers
            for _, shape in spec.parameters
            if len(shape) == 2
        )
        return min(2 * forward, forward + 2.0 * tokens * trained)

    @property
    def passes(self) -> float:
        """The cost of training a micro-batch, in forward passes."""
        forward = sum(layer.flops for layer in self.layers)
        backward = sum(map(self.backward_flops, range(len(self.layers))))
        return 1 + (backward / forward if forward else 2.0)

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """The module's state dict without the parameters, by name: nobody trains it, and every node has the same."""
        stored = self.module.state_dict()
        return {name: buffer for name, buffer in self.module.named_buffers() if name in stored and not buffer.is_meta}

    def activation_shape(self, layer: int, micro_batch: int) -> tuple[int, ...]:
        """Shape of the layer's output for one micro-batch. Its dtype is the stage's."""
        return (micro_batch, *self.layers[layer].output)

    def initial_parameters(self, bucket: BucketSpec, seed: int) -> dict[str, torch.Tensor]:
        """Initial values by name, float32 on the CPU (float64 where weights are stored so): a function of (seed, bucket) alone,
        not of the partition.

        Raises:
            ValueError: a parameter is left unset by the model's own rules, or weights cannot be read.
        """
        if not bucket.parameters:
            return {}
        values = initial_values(self.initialised_parts(bucket), self.initialise_module, seed, bucket.index)
        return {name: values[name] for name, _ in bucket.parameters}

    def initialised_parts(self, bucket: BucketSpec) -> Mapping[str, nn.Module]:
        """By name, the submodules whose initialisation sets the bucket's parameters."""
        if bucket.index < len(self.layers):
            roots = self.layers[bucket.index].roots
        else:
            roots = tuple(dict.fromkeys(name.rpartition(".")[0] for name, _ in bucket.parameters))
        return {root: self.module.get_submodule(root) for root in roots}


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device and real buffers."""

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # unchanged, so that tied parameters stay one
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # may return a parameter
    try:
        yield
    finally:
        handle.remove()


def fake_parameters(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Under a FakeTensorMode: replaces parameters by fake ones with a device and a shape but no memory. They have ``dtype``, or
    the parameter's own dtype, and get gradients if the parameter does."""
    fakes: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None:
                if old not in fakes:
                    fake = torch.empty(old.shape, dtype=dtype or old.dtype)
                    fakes[old] = nn.Parameter(fake, requires_grad=old.requires_grad)
                part._parameters[name] = fakes[old]


def computed_again(layer: Callable[..., Any]) -> Callable[..., Any]:
    """``layer``, changed to keep its input alone for the backward pass, which computes the rest again. No state of random numbers
    is kept: a layer drops the same numbers again (`Dropout`), and does nothing else at random."""

    def again(*args: Any, **keywords: Any) -> Any:
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": dropping_again}
        return checkpoint(layer, *args, **how, **keywords)

    return again


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, without keeping its object alive. If a module has an attribute that refers back to the module, both form a
    cycle: the weights stay in the device's memory until the garbage collector finds the cycle."""
    if not isinstance(method, MethodType):
        return method
    weak = weakref.WeakMethod(method)

    def call(*args: Any, **keywords: Any) -> Any:
        alive = weak()
        assert alive is not None
        return alive(*args, **keywords)

    return call


def canonical_names(module: nn.Module) -> dict[int, str]:
    """The first name of each parameter, by the parameter's id()."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


_RATES = "A_log"
"""Mamba's decay rates: a matrix to which its authors apply no weight decay. Not all releases of transformers mark it so."""


def _is_kept(name: str, parameter: nn.Parameter) -> bool:
    """Whether the family says that weight decay does not apply to the parameter."""
    return bool(getattr(parameter, "_no_weight_decay", False)) or name.rpartition(".")[2] == _RATES


def _buckets(module: nn.Module, layers: tuple[Layer, ...]) -> tuple[BucketSpec, ...]:
    """One bucket per layer for the parameters that only it uses, then one per parameter that several layers use. Frozen
    parameters are in none."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    canonical = canonical_names(module)
    users: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        for name in layer.parameters:
            if not parameters[name].requires_grad:
                continue
            of = users.setdefault(canonical[id(parameters[name])], [])
            if number not in of:
                of.append(number)

    def spec(index: int, of: tuple[int, ...], names: Sequence[str]) -> BucketSpec:
        shapes = tuple((name, tuple(parameters[name].shape)) for name in names)
        kept = frozenset(name for name in names if _is_kept(name, parameters[name]))
        return BucketSpec(index, of, shapes, kept=kept)

    own = [
        spec(number, (number,), [name for name, of in users.items() if of == [number]]) for number in range(len(layers))
    ]
    shared = [(name, tuple(of)) for name, of in users.items() if len(of) > 1]
    tied = [spec(len(layers) + i, of, [name]) for i, (name, of) in enumerate(shared)]
    return (*own, *tied)

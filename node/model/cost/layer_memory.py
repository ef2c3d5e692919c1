"""The memory that each layer keeps for its backward pass, and the memory that it takes for a while.

Both passes are followed without computing. Every layer runs forward and backward on fake tensors, which have shapes and no
memory, through the code of a stage. Fused attention is dispatched as on a CPU: it keeps the same as on a GPU, namely query,
key, value, output and a number per row. The head runs in chunks. So the figures are the same on every node, whatever its
device. Memory within one of torch's own operations is not seen.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dtfm.node.model.dropout import MicroBatch, dropping
from dtfm.node.model.loss import loss_of_part
from dtfm.node.model.model import Model, Part, fake_parameters

log = logging.getLogger(__name__)

USUALLY_KEPT = 16
"""Bytes that are kept per byte of output, where a model's own code cannot be followed: see scheduler/model/memory.py."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes for one micro-batch. ``kept``, from the forward to the backward pass, includes the layer's input. ``working`` is
    the most that either pass allocates in addition. It includes the layer's output, the gradients of output and input, and one
    parameter's gradient."""

    kept: int
    working: int


@lru_cache(maxsize=8)
def layer_memory(
    model: Model, micro_batch: int, computes_in: torch.dtype, adds_up_in: torch.dtype
) -> tuple[LayerMemory, ...]:
    """By layer, for stages that compute in ``computes_in`` and add gradients up in ``adds_up_in``."""
    try:
        return tuple(_measured(model, micro_batch, computes_in, adds_up_in))
    except Exception as error:  # the model's own code
        log.warning("what the layers keep in memory is guessed, since it cannot be measured: %s", error)
        return tuple(
            LayerMemory(USUALLY_KEPT * math.prod(model.activation_shape(number, micro_batch)) * computes_in.itemsize, 0)
            for number in range(len(model.layers))
        )


def _measured(
    model: Model, micro_batch: int, computes_in: torch.dtype, adds_up_in: torch.dtype
) -> Iterator[LayerMemory]:
    whole = copy.deepcopy(model.module)
    watch = _Watch()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_parameters(whole, computes_in)
        for part in whole.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    part._buffers[name] = buffer.to(model.buffer_dtype(computes_in))
        for parameter in whole.parameters():
            watch.ignore(parameter)
            if not parameter.requires_grad:
                continue
            if computes_in == adds_up_in:
                parameter.grad = torch.zeros_like(parameter)
                watch.ignore(parameter.grad)
            else:
                parameter.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
        for number, part_of_layer in enumerate(model.layerwise(whole)):
            with watch, dropping(MicroBatch(0, 0)):
                yield _of_layer(model, number, part_of_layer, whole, micro_batch, computes_in, watch)


def _of_layer(
    model: Model, number: int, part: Part, whole: nn.Module, micro_batch: int, computes_in: torch.dtype, watch: _Watch
) -> LayerMemory:
    before = watch.most = watch.live
    x = _input(model, number, micro_batch, computes_in)
    if number < len(model.layers) - 1:
        y = part.body(x).to(computes_in)
    else:
        layer = model.layers[number]
        labels = torch.zeros(micro_batch, *layer.output[:-1], dtype=torch.int64)
        read = list({id(p): p for p in map(whole.get_parameter, layer.parameters) if p.requires_grad}.values())
        y = loss_of_part(part, x, labels, layer.output[-1], read).weighted
        del labels
    forward = watch.most
    if not y.requires_grad:
        return LayerMemory(x.untyped_storage().nbytes(), forward - before - x.untyped_storage().nbytes())
    shape, dtype = y.shape, y.dtype
    edge = get_gradient_edge(y)
    del y
    kept, watch.most = watch.live - before, watch.live
    gradient = torch.zeros(shape, dtype=dtype)
    torch.autograd.backward(edge, gradient)
    backward = watch.most
    del edge, gradient, x
    if watch.live > before:
        gc.collect()
    return LayerMemory(kept, max(0, forward - before - kept, backward - before - kept))


def _input(model: Model, number: int, micro_batch: int, computes_in: torch.dtype) -> torch.Tensor:
    if number:
        return torch.zeros(model.activation_shape(number - 1, micro_batch), dtype=computes_in, requires_grad=True)
    sample = model.sample
    return torch.zeros(
        micro_batch, *sample.shape, dtype=computes_in if sample.dtype.is_floating_point else sample.dtype
    )


def _forget(parameter: torch.Tensor) -> None:
    parameter.grad = None


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of living fake tensors that operations inside have made, each storage once.

    ``most`` is the most bytes that were alive at one time, since the start or since it was last set.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.most = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leaves tensors out that share this tensor's memory."""
        self._know(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, FakeTensor):
                self._know(tensor, tensor.untyped_storage().nbytes())
        self.most = max(self.most, self.live)
        return out

    def _know(self, tensor: torch.Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return

        def gone(_: object) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.live += size

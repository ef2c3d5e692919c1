"""The model's cost, as the scheduler is told it: what its layers take, and how fast a device computes them."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections import Counter

import torch

from dtfm.kernels.codec import codec_named
from dtfm.kernels.memory import give_back
from dtfm.node.host.device import finish, free_memory
from dtfm.node.model.bucket import STATE_TENSORS
from dtfm.node.model.model import Model
from dtfm.node.model.stage import build_stage
from dtfm.protos import plan_pb2
from dtfm.protos.control_pb2 import Device

log = logging.getLogger(__name__)

RESIDUAL_BYTES = 8
"""Per parameter, under a sparse codec: what messages of committed steps have left out, and those of the step in hand."""

TIMED_SECONDS = 0.3
LEAST_TIMED = 3
"""Passes, unless the first one takes longer than MOST_EXPECTED_SECONDS. Where it is expected to, by the speed of matrix products,
there is none."""
MOST_EXPECTED_SECONDS = 2.0
KEPT_IN_LAYER = 64
"""So many times its output a layer keeps for its backward pass at most, but for the scores of attention (17 times in a
transformer's layer, arXiv 2205.05198, section 4)."""


def run_dtype(run: plan_pb2.Run) -> torch.dtype:
    """The dtype of weights, gradients, moments and activations between stages."""
    return torch.float64 if run.train.precision == plan_pb2.FP64 else torch.float32


def workload(model: Model, run: plan_pb2.Run) -> plan_pb2.Workload:
    """Per layer: FLOPs and output bytes of one micro-batch, and the bytes of all parameters that it uses.

    Counted without computing, so that all nodes of a run say the same. A parameter that several layers share counts for
    each of them: any of them alone needs it. What a sparse codec of the reduction carries from step to step is the node's own.
    """
    train, width = run.train, run_dtype(run).itemsize
    reduction = run.network.reduction
    sparse = reduction not in ("", "auto") and codec_named(reduction).sparse
    parameter_bytes = [0] * len(model.layers)
    for bucket in model.buckets:
        for layer in bucket.layers:
            parameter_bytes[layer] += bucket.size * width
    return plan_pb2.Workload(
        layers=[
            plan_pb2.Workload.Layer(
                name=layer.name,
                forward_flops=layer.flops * train.micro_batch,
                parameter_bytes=parameter_bytes[number],
                activation_bytes=math.prod(model.activation_shape(number, train.micro_batch)) * width,
            )
            for number, layer in enumerate(model.layers)
        ],
        micro_batches=train.global_batch // train.micro_batch,
        optimizer_bytes_per_parameter_byte=STATE_TENSORS - 1,
        own_bytes_per_parameter_byte=RESIDUAL_BYTES / width if sparse else 0,
    )


def layer_flops(model: Model, run: plan_pb2.Run, device: torch.device, products: Device) -> float | None:
    """FLOP/s at which ``device`` computes a micro-batch, forward and backward, through a layer of the kind that most of the
    model's FLOPs are in: in the fastest of some passes after a warm-up, as others may use the device in that moment.

    A layer is more than matrix products, and small ones do not fill a device: a third to three quarters of what ``products`` says
    of these was seen. None where one layer does not fit the device, would take too long by that, or fails on made-up input.
    """
    of_layers = [layer.flops for layer in model.layers]
    alike = Counter(of_layers)
    number = max(range(len(of_layers)), key=lambda layer: alike[of_layers[layer]] * of_layers[layer])
    micro_batch, dtype = run.train.micro_batch, run_dtype(run)
    flops = 3 * micro_batch * model.layers[number].flops
    state = sum(4 * spec.size * dtype.itemsize for spec in model.buckets if number in spec.layers)
    within = KEPT_IN_LAYER * math.prod(model.activation_shape(number, micro_batch)) * dtype.itemsize
    if not flops or flops > MOST_EXPECTED_SECONDS * products.flops:
        return None
    if state + within > min(products.memory_bytes, free_memory(device)):
        return None
    try:
        return flops / _pass_seconds(model, number, run, device)
    except Exception as error:  # a model's own code, or too little memory: no reason not to train
        log.warning("layer %d could not be timed: %s", number, error)
        return None
    finally:
        gc.collect()  # a slice of a causal LM refers to itself
        give_back(now=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _pass_seconds(model: Model, number: int, run: plan_pb2.Run, device: torch.device) -> float:
    stage = build_stage(
        model, number, number + 1, device, run_dtype(run), autocast=run.train.precision == plan_pb2.BF16
    )
    some = torch.Generator(device).manual_seed(0)
    for bucket in stage.buckets.values():
        bucket.parameters.normal_(std=0.02, generator=some)

    def made_up_input() -> torch.Tensor:
        if number:
            shape = model.activation_shape(number - 1, run.train.micro_batch)
            return torch.randn(shape, dtype=stage.dtype, device=device, generator=some).requires_grad_()
        shape, dtype = (run.train.micro_batch, *model.sample.shape), model.sample.dtype
        if dtype.is_floating_point:
            return torch.randn(shape, dtype=stage.dtype, device=device, generator=some)
        return torch.randint(model.sample.vocabulary or 2, shape, dtype=dtype, device=device, generator=some)

    def timed() -> float:
        x = made_up_input()
        finish(device)
        began = time.perf_counter()
        y = stage.forward(x)
        torch.autograd.backward(y, torch.ones_like(y))
        finish(device)
        return time.perf_counter() - began

    if (first := timed()) > MOST_EXPECTED_SECONDS:
        return first
    seconds: list[float] = []
    until = time.perf_counter() + TIMED_SECONDS
    while len(seconds) < LEAST_TIMED or time.perf_counter() < until:
        seconds.append(timed())
    return min(seconds)

"""The costs of each layer, as nodes report them to the scheduler, and how fast a device computes a layer."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections import Counter

import torch

from dtfm.kernels.memory import give_back
from dtfm.node.host.cuda_streams import wait_until_computed
from dtfm.node.host.device import free_memory
from dtfm.node.model.cost.layer_memory import layer_memory
from dtfm.node.model.dropout import MicroBatch, dropping
from dtfm.node.model.model import Model
from dtfm.node.model.precision import compute_dtype, run_dtype
from dtfm.node.model.stage import build_stage
from dtfm.protos import plan_pb2
from dtfm.protos.control_pb2 import Device

log = logging.getLogger(__name__)

TIMED_SECONDS = 0.3
"""Seconds of timed passes through a layer."""
LEAST_TIMED, MOST_TIMED = 3, 30
"""The fewest timed passes, unless the first takes longer than MOST_EXPECTED_SECONDS, and the most for even the smallest layer."""
MOST_EXPECTED_SECONDS = 2.0
"""A pass that should take longer than this, by the speed of matrix products, is not timed."""


def layer_costs(model: Model, run: plan_pb2.Run) -> list[plan_pb2.Layer]:
    """Per layer: FLOPs, output bytes and memory of one micro-batch, and the bytes of the parameters that it uses, trained and
    frozen.

    Counted, not measured, so that all nodes of a run report the same. A shared parameter counts for each layer that uses it,
    since each of them needs it.
    """
    samples, width, computes_in = run.train.micro_batch, run_dtype(run).itemsize, compute_dtype(run)
    memory = layer_memory(model, samples, computes_in, run_dtype(run))
    parameter_bytes, orthogonal_bytes = [0] * len(model.layers), [0] * len(model.layers)
    for bucket in model.buckets:
        for layer in bucket.layers:
            parameter_bytes[layer] += bucket.size * width
            orthogonal_bytes[layer] += sum(bucket.matrix_sizes) * width
    return [
        plan_pb2.Layer(
            name=layer.name,
            forward_flops=layer.flops * samples,
            parameter_bytes=parameter_bytes[number],
            activation_bytes=math.prod(model.activation_shape(number, samples)) * computes_in.itemsize,
            kept_bytes=memory[number].kept,
            working_bytes=memory[number].working + model.frozen.unpacked_bytes(number, computes_in),
            frozen_bytes=model.frozen.layer_bytes(number, computes_in),
            orthogonal_bytes=orthogonal_bytes[number],
            backward_flops=model.backward_flops(number) * samples if model.frozen else 0.0,
        )
        for number, layer in enumerate(model.layers)
    ]


def layer_flops(model: Model, run: plan_pb2.Run, device: torch.device, products: Device) -> float | None:
    """FLOP/s of ``device`` for forward and backward of one micro-batch through the most expensive kind of layer.

    If compiled layers fail, the model compiles none from then on.

    Returns the fastest of several passes after a warm-up, because others may use the device at the time. This is less than the
    speed of matrix products in ``products``; a third to three quarters was seen. A layer does more than multiply, and small
    matrices do not fill a device. Returns None if a layer does not fit the device, should take too long, or fails on made-up
    input.
    """
    of_layers = [layer.flops for layer in model.layers]
    alike = Counter(of_layers)
    number = max(range(len(of_layers)), key=lambda layer: alike[of_layers[layer]] * of_layers[layer])
    micro_batch, dtype = run.train.micro_batch, run_dtype(run)
    flops = micro_batch * (model.layers[number].flops + model.backward_flops(number))
    if not flops or flops > MOST_EXPECTED_SECONDS * products.flops:
        return None
    state = sum(5 * spec.size * dtype.itemsize for spec in model.buckets if number in spec.layers)
    state += model.frozen.layer_bytes(number, compute_dtype(run))
    memory = layer_memory(model, micro_batch, compute_dtype(run), dtype)[number]
    if state + memory.kept + memory.working > min(products.memory_bytes, free_memory(device)):
        return None
    try:
        return flops / _pass_seconds(model, number, run, device)
    except Exception as error:  # the model's own code, or too little memory; training may still work
        if not model.compiles:
            log.warning("layer %d could not be timed: %s", number, error)
            return None
        log.warning("train.compile: layers are not compiled, because compiled layer %d fails: %s", number, error)
        model.compiles = False
    finally:
        gc.collect()  # a slice of a causal LM is a reference cycle
        give_back(now=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return layer_flops(model, run, device, products)


def _pass_seconds(model: Model, number: int, run: plan_pb2.Run, device: torch.device) -> float:
    stage = build_stage(
        model,
        number,
        number + 1,
        device,
        run_dtype(run),
        computes_in=compute_dtype(run),
        frozen=model.frozen.made_up(),
    )
    some = torch.Generator(device).manual_seed(0)
    for bucket in stage.buckets.values():
        bucket.parameters.normal_(std=0.02, generator=some)
        stage.refresh(bucket.spec.index)

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
        wait_until_computed(device)
        began = time.perf_counter()
        with dropping(MicroBatch(0, 0)):
            y = stage.forward(x)
        torch.autograd.backward(y, torch.ones_like(y))
        wait_until_computed(device)
        return time.perf_counter() - began

    if model.compiles:  # now, rather than while others wait for this node
        timed()
        with torch.no_grad():
            stage.forward(made_up_input().detach())
    if (first := timed()) > MOST_EXPECTED_SECONDS:
        return first
    seconds: list[float] = []
    until = time.perf_counter() + TIMED_SECONDS
    while len(seconds) < LEAST_TIMED or (len(seconds) < MOST_TIMED and time.perf_counter() < until):
        seconds.append(timed())
    return min(seconds)

"""The model's cost, as the scheduler is told it."""

from __future__ import annotations

import math

import torch

from dtfm.kernels.codec import codec_named
from dtfm.node.bucket import STATE_TENSORS
from dtfm.node.model import Model
from dtfm.protos import plan_pb2

RESIDUAL_BYTES = 8
"""Per parameter, under a sparse codec: what messages of committed steps have left out, and those of the step in hand."""


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

"""What a stage takes of a device's memory."""

from __future__ import annotations

import math

from dtfm.scheduler.workload import Workload

KEPT_PER_OUTPUT_BYTE = 16.0
"""Bytes that the forward pass of a layer keeps for its backward, per byte of its output.

A decoder layer without its attention scores keeps 34 bytes per hidden value of 2 bytes (Korthikanti et al. 2022, section
4.1, scores recomputed as fused attention does), dropout masks aside 32: 16 times its output.
"""


def state_bytes(workload: Workload, first: int, past_last: int) -> float:
    """Weights, gradients and optimizer state of layers [first, past_last)."""
    parameters = sum(layer.parameter_bytes for layer in workload.layers[first:past_last])
    return parameters * (2.0 + workload.optimizer_bytes_per_parameter_byte)


def in_flight_bytes(workload: Workload, first: int, past_last: int) -> float:
    """What layers [first, past_last) keep for every micro-batch between its forward and its backward."""
    return KEPT_PER_OUTPUT_BYTE * sum(layer.activation_bytes for layer in workload.layers[first:past_last])


def in_flight_limit(workload: Workload, first: int, past_last: int, memory_bytes: float) -> int:
    """How many micro-batches a device can hold in flight beside the state of layers [first, past_last); 0: not even one."""
    spare = memory_bytes - state_bytes(workload, first, past_last)
    if spare < 0:
        return 0
    each = in_flight_bytes(workload, first, past_last)
    return workload.micro_batches if each == 0 else min(workload.micro_batches, math.floor(spare / each))

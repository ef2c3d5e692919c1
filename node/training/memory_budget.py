"""How much memory may be used beside what training needs: state, and the micro-batches in flight.

Copies for safety lie in the host's memory. On a CPU this memory also holds everything else, so the copies may take only a
part of the memory that the state and the micro-batches leave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dtfm.node.model.cost.layer_memory import LayerMemory, layer_memory
from dtfm.node.model.placement import Placement
from dtfm.node.model.precision import compute_dtype, run_dtype
from dtfm.node.model.stage import Stage
from dtfm.protos.control_pb2 import Device
from dtfm.protos.plan_pb2 import Run
from dtfm.scheduler.model.memory import Checkpointing

RETRY_FRACTION = 0.5
"""The fraction of the free memory that the work kept for another attempt at a step may take."""

EARLY_FRACTION = 0.125
"""The fraction of that memory for gradients from replicas that are ahead of this node."""

SHORT = 1.5
"""Memory is short below this multiple of the state: malloc was seen to keep a tenth of the state in holes."""

LEAST_EARLY_BYTES, MOST_EARLY_BYTES = 16 << 20, 1 << 30
"""Room for early gradients from each replica however short memory is, which keeps a link busy while a piece is summed; and the
most for those of all replicas."""


def computing_bytes(
    layers: Sequence[LayerMemory], inputs: Sequence[int], in_flight: int, checkpointing: Checkpointing
) -> int:
    """The bytes that ``in_flight`` micro-batches take in a stage of these layers, whose inputs take ``inputs`` bytes."""
    if checkpointing is Checkpointing.LAYER:
        return in_flight * sum(inputs) + max(layer.kept + layer.working for layer in layers)
    return in_flight * sum(layer.kept for layer in layers) + max(layer.working for layer in layers)


def stage_computing_bytes(run: Run, placement: Placement, stage: Stage) -> int:
    """The same for all micro-batches that are in flight at a time in a node's ``stage``."""
    micro_batch = run.train.micro_batch
    memory = layer_memory(stage.model, micro_batch, compute_dtype(run), run_dtype(run))[stage.first : stage.past_last]
    inputs = [
        math.prod(stage.model.activation_shape(layer - 1, micro_batch)) * stage.dtype.itemsize if layer else 0
        for layer in range(stage.first, stage.past_last)
    ]
    in_flight = min(placement.in_flight, len(placement.micro_batches))
    return computing_bytes(memory, inputs, in_flight, stage.keeping.checkpointing)


def free_bytes(on_device: int, on_host: int, hardware: Device) -> int:
    """The host's memory that remains when training needs ``on_device`` and ``on_host``."""
    if hardware.kind == "cpu":
        return max(0, hardware.memory_bytes - on_device - on_host)
    return max(0, hardware.host_memory_bytes - on_host)


def retry_bytes(free: int) -> int:
    """Most bytes that may be kept of a step's work for another attempt, of ``free`` bytes."""
    return int(RETRY_FRACTION * free)


def is_short(state_bytes: int, hardware: Device) -> bool:
    """Whether freed memory must go back to the system at once."""
    return hardware.kind == "cpu" and hardware.memory_bytes < SHORT * state_bytes


def early_bytes(free: int, replicas: int) -> int:
    """Most bytes of gradients that may wait here from each of ``replicas`` other members of this node's groups."""
    return max(LEAST_EARLY_BYTES, int(min(MOST_EARLY_BYTES, EARLY_FRACTION * free) / max(replicas, 1)))

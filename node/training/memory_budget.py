"""How much memory may be used beside the state: weights, gradients and moments."""

from __future__ import annotations

from dtfm.protos.control_pb2 import Device

MOST_RETRY_BYTES = 1 << 30
"""Most bytes of a step's work that are kept for another attempt at the step."""

RETRY_FRACTION = 0.25
"""The fraction of the memory left by the state that the work kept for a retry may take, on a CPU. With a GPU, host memory is
otherwise unused."""

EARLY_FRACTION = 0.125
"""The fraction of that memory for gradients from replicas that are ahead of this node."""

SHORT = 1.5
"""Memory is short below this multiple of the state: malloc was seen to keep a tenth of the state in holes."""

LEAST_EARLY_BYTES = 16 << 20
"""Room for early gradients from each replica however short memory is: it keeps a link busy while a piece is summed."""


def retry_bytes(state_bytes: int, hardware: Device) -> int:
    """Most bytes that may be kept of a step's work for another attempt."""
    if hardware.kind != "cpu":
        return MOST_RETRY_BYTES
    return max(0, min(MOST_RETRY_BYTES, int(RETRY_FRACTION * (hardware.memory_bytes - state_bytes))))


def is_short(state_bytes: int, hardware: Device) -> bool:
    """Whether freed memory must go back to the system at once."""
    return hardware.kind == "cpu" and hardware.memory_bytes < SHORT * state_bytes


def early_bytes(state_bytes: int, hardware: Device, replicas: int) -> int:
    """Most bytes of gradients that may wait here from each of ``replicas`` other members of this node's groups."""
    free = hardware.memory_bytes - state_bytes if hardware.kind == "cpu" else MOST_RETRY_BYTES / EARLY_FRACTION
    return max(LEAST_EARLY_BYTES, int(min(MOST_RETRY_BYTES, EARLY_FRACTION * free) / max(replicas, 1)))

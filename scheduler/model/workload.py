"""The model as the scheduler sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. FLOPs and activation bytes are per micro-batch; backward costs twice the forward."""

    name: str
    forward_flops: float
    parameter_bytes: float
    activation_bytes: float

    def __post_init__(self) -> None:
        for field in ("forward_flops", "parameter_bytes", "activation_bytes"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"layer {self.name!r}: {field} is {value}; it must be a finite number, 0 or above")


@dataclass(frozen=True, slots=True)
class PaperCosts:
    """What the paper's cost model reads of a workload (arXiv 2206.01288, section 3).

    ``gradient_gigabytes`` is per stage, ``activation_gigabytes`` per pipeline: all micro-batches of a step that cross one
    stage boundary on one route. Gigabytes are 1e9 bytes.
    """

    stages: int
    replicas: int
    gradient_gigabytes: float
    activation_gigabytes: float

    def __post_init__(self) -> None:
        for field in ("stages", "replicas"):
            value = getattr(self, field)
            if value < 1:
                raise ValueError(f"paper: {field} is {value}; it must be 1 or more")
        for field in ("gradient_gigabytes", "activation_gigabytes"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"paper: {field} is {value}; it must be a finite number, 0 or above")


@dataclass(frozen=True, slots=True)
class Workload:
    """Layers in model order; a stage's output is its last layer's activation.

    A node that holds a layer keeps its weights, gradients and optimizer state, and of its own so many bytes more per byte of
    weights (``own_bytes_per_parameter_byte``) that take memory and are never moved.
    """

    layers: tuple[Layer, ...]
    micro_batches: int
    optimizer_bytes_per_parameter_byte: float = 2.0
    paper: PaperCosts | None = None
    own_bytes_per_parameter_byte: float = 0.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers is empty; a workload needs at least one")
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches is {self.micro_batches}; it must be 1 or more")
        for field in ("optimizer_bytes_per_parameter_byte", "own_bytes_per_parameter_byte"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field} is {value}; it must be a finite number, 0 or above")

    @property
    def bytes_kept_per_parameter_byte(self) -> float:
        """Of a device's memory: weights, gradients, optimizer state, and the node's own."""
        return 2.0 + self.optimizer_bytes_per_parameter_byte + self.own_bytes_per_parameter_byte

    @property
    def bytes_moved_per_parameter_byte(self) -> float:
        """To a node that takes over a layer: weights and optimizer state."""
        return 1.0 + self.optimizer_bytes_per_parameter_byte

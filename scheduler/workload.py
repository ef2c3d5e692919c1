"""The model as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. FLOPs and activation bytes are per micro-batch; backward costs twice the forward."""

    name: str
    forward_flops: float
    parameter_bytes: float
    activation_bytes: float


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


@dataclass(frozen=True, slots=True)
class Workload:
    """Layers in model order; a stage's output is its last layer's activation."""

    layers: tuple[Layer, ...]
    micro_batches: int
    optimizer_bytes_per_parameter_byte: float = 2.0
    paper: PaperCosts | None = None

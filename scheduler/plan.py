"""Who computes what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [first, past_last) and the nodes that each hold all of them."""

    layers: tuple[int, int]
    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """One node per stage, and how many of the step's micro-batches travel this chain.

    Micro-batches are numbered from 0 within a step; a plan's routes take consecutive numbers in the order they stand.
    """

    nodes: tuple[str, ...]
    micro_batches: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages in pipeline order. A node is in exactly one stage, or idle."""

    generation: int
    stages: tuple[Stage, ...]
    routes: tuple[Route, ...]
    idle: tuple[str, ...] = ()

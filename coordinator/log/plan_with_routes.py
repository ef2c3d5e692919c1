"""Plans as older logs have them: with routes instead of loads and flows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from dtfm.scheduler.model.plan import Stage, from_routes


@dataclass(frozen=True, slots=True)
class _Stage:
    layers: tuple[int, int]
    replicas: tuple[str, ...]
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class _Route:
    nodes: tuple[str, ...]
    micro_batches: int


@dataclass(frozen=True, slots=True)
class _Plan:
    generation: int
    stages: tuple[_Stage, ...]
    routes: tuple[_Route, ...]
    idle: tuple[str, ...] = ()


_ADAPTER: TypeAdapter[_Plan] = TypeAdapter(_Plan)


def with_flows(value: Any) -> Any:
    """The plan with the same loads and flows, if ``value`` is JSON with routes; otherwise ``value`` itself. Micro-batches get
    other numbers, which does no harm: no work of an interrupted step outlives an update of dtfm. Raises ValueError.
    """
    if not (isinstance(value, dict) and "routes" in value):
        return value
    old = _ADAPTER.validate_python(value)
    stages = [Stage(stage.layers, stage.replicas, (), stage.in_flight) for stage in old.stages]
    return from_routes(old.generation, stages, [(route.nodes, route.micro_batches) for route in old.routes], old.idle)

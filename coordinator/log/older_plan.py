"""Plans as older logs have them: with routes instead of loads and flows, and one number in flight per stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from dtfm.scheduler.model.plan import Stage, for_each, from_routes


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


def as_written_now(value: Any) -> Any:
    """``value``, as today's logs have it if it is JSON of an older plan. Raises ValueError.

    The plan has the same loads and flows as its routes had. Micro-batches get other numbers, which does no harm: no work of an
    interrupted step outlives an update of dtfm. One number in flight per stage is that of each of its replicas.
    """
    if not isinstance(value, dict):
        return value
    if "routes" in value:
        old = _ADAPTER.validate_python(value)
        stages = [
            Stage(stage.layers, stage.replicas, (), for_each(stage.in_flight, len(stage.replicas)))
            for stage in old.stages
        ]
        routes = [(route.nodes, route.micro_batches) for route in old.routes]
        return from_routes(old.generation, stages, routes, old.idle)
    match value.get("stages"):
        case [*stages]:
            return {**value, "stages": [_with_each_in_flight(stage) for stage in stages]}
    return value


def _with_each_in_flight(stage: Any) -> Any:
    match stage:
        case {"in_flight": int(number), "replicas": [*replicas]}:
            return {**stage, "in_flight": for_each(number, len(replicas))}
    return stage

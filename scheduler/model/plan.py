"""The plan: which node computes what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from dtfm.scheduler.model.workload import Workload


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [first, past_last) and the replicas, nodes that each hold all of these layers.

    ``in_flight`` is the largest number of micro-batches that each replica holds between forward and backward; 0 means
    memory.in_flight.
    """

    layers: tuple[int, int]
    replicas: tuple[str, ...]
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """One node per stage, and the number of a step's micro-batches that travel along it.

    Micro-batches are numbered from 0 within a step. The routes of a plan take consecutive numbers, in order.
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

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes that compute, stage by stage."""
        return tuple(node for stage in self.stages for node in stage.replicas)

    def stage_of(self, node: str) -> int | None:
        """Index of the stage that the node holds, or None."""
        return next((index for index, stage in enumerate(self.stages) if node in stage.replicas), None)


def micro_batch_numbers(plan: Plan) -> tuple[range, ...]:
    """For each route, the numbers of its micro-batches within a step."""
    ranges = []
    first = 0
    for route in plan.routes:
        ranges.append(range(first, first + route.micro_batches))
        first += route.micro_batches
    return tuple(ranges)


def validate(plan: Plan, cluster_ids: Collection[str], workload: Workload) -> None:
    """Raises ValueError unless the plan is valid for these nodes and this workload.

    A plan is valid when its stages cover every layer once and in order, each node of the cluster is in exactly one
    stage or idle, no other node is named, each route has one replica of every stage, and the routes' micro-batches
    are positive and add up to the step's. Whether the links exist and the memory suffices is not checked here.
    """
    if not plan.stages:
        raise ValueError("the plan has no stages")
    expected = 0
    for index, stage in enumerate(plan.stages):
        first, past_last = stage.layers
        if first != expected or past_last <= first:
            raise ValueError(
                f"stage {index} has layers [{first}, {past_last}); it must start at {expected} and not be empty"
            )
        if not stage.replicas:
            raise ValueError(f"stage {index} has no replicas")
        expected = past_last
    if expected != len(workload.layers):
        raise ValueError(f"the stages end at layer {expected}; the workload has {len(workload.layers)}")

    places = Counter([*plan.nodes, *plan.idle])
    for node, count in places.items():
        if count > 1:
            raise ValueError(f"node {node!r} appears {count} times; it may appear once")
        if node not in cluster_ids:
            raise ValueError(f"node {node!r} is not in the cluster")
    missing = sorted(set(cluster_ids) - set(places))
    if missing:
        raise ValueError(f"node {missing[0]!r} is neither in a stage nor idle")

    holders = [set(stage.replicas) for stage in plan.stages]
    for index, route in enumerate(plan.routes):
        if len(route.nodes) != len(plan.stages):
            raise ValueError(f"route {index} has {len(route.nodes)} nodes; there are {len(plan.stages)} stages")
        for node, stage, held_by in zip(route.nodes, plan.stages, holders, strict=True):
            if node not in held_by:
                raise ValueError(f"route {index} passes {node!r}, which does not hold layers {list(stage.layers)}")
        if route.micro_batches < 1:
            raise ValueError(f"route {index} has {route.micro_batches} micro-batches; it must have at least 1")
    total = sum(route.micro_batches for route in plan.routes)
    if total != workload.micro_batches:
        raise ValueError(f"the routes' micro-batches add up to {total}; a step has {workload.micro_batches}")

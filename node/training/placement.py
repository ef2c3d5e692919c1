"""What a plan means for one node: its stage, its peers, and what goes where."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dtfm.protos.plan_pb2 import Plan


@dataclass(frozen=True, slots=True)
class Share:
    """One node's part of a plan. Micro-batches are numbers within a step.

    ``previous`` and ``next`` say for each of this node's micro-batches who sends its activation and who takes it on; they
    are empty on the first and last stage. The ``evaluation_*`` maps say the same for held-out micro-batches.
    """

    node: str
    generation: int
    stage: int
    stages: int
    layers: tuple[int, int]
    replicas: tuple[str, ...]
    micro_batches: tuple[int, ...]
    previous: Mapping[int, str]
    next: Mapping[int, str]
    evaluation_micro_batches: tuple[int, ...]
    evaluation_previous: Mapping[int, str]
    evaluation_next: Mapping[int, str]
    in_flight: int
    """Micro-batches that may be forward but not yet backward here."""

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1


def share_of(plan: Plan, node: str, evaluation_micro_batches: int) -> Share | None:
    """``node``'s share, or None when it is idle. Routes take consecutive micro-batches in plan order; held-out ones go round."""
    stage = next((i for i, s in enumerate(plan.stages) if node in s.replicas), None)
    if stage is None:
        return None
    route_of_micro_batch = [r for r, route in enumerate(plan.routes) for _ in range(route.micro_batches)]
    evaluation_route = [e % len(plan.routes) for e in range(evaluation_micro_batches)]
    mine = _mine(plan, node, stage, route_of_micro_batch)
    held_out = _mine(plan, node, stage, evaluation_route)
    return Share(
        node=node,
        generation=plan.generation,
        stage=stage,
        stages=len(plan.stages),
        layers=(plan.stages[stage].first_layer, plan.stages[stage].past_last_layer),
        replicas=tuple(plan.stages[stage].replicas),
        micro_batches=mine,
        previous=_neighbours(plan, mine, route_of_micro_batch, stage - 1),
        next=_neighbours(plan, mine, route_of_micro_batch, stage + 1),
        evaluation_micro_batches=held_out,
        evaluation_previous=_neighbours(plan, held_out, evaluation_route, stage - 1),
        evaluation_next=_neighbours(plan, held_out, evaluation_route, stage + 1),
        # As many as the plan says; else one per stage that follows, and as many again to keep links and devices busy.
        in_flight=plan.stages[stage].in_flight or 2 * (len(plan.stages) - stage),
    )


def _mine(plan: Plan, node: str, stage: int, routes: list[int]) -> tuple[int, ...]:
    return tuple(m for m, r in enumerate(routes) if plan.routes[r].nodes[stage] == node)


def _neighbours(plan: Plan, micro_batches: tuple[int, ...], routes: list[int], stage: int) -> dict[int, str]:
    if not 0 <= stage < len(plan.stages):
        return {}
    return {m: plan.routes[routes[m]].nodes[stage] for m in micro_batches}


@dataclass(frozen=True, slots=True)
class Group:
    """The nodes that hold one bucket, in pipeline order: they reduce its gradients together.

    A layer's bucket is held by the replicas of its stage; a tied parameter's by those of every stage that uses it.
    ``counted_by`` are the replicas of the first of these stages, which alone count the bucket in the gradient norm.
    """

    members: tuple[str, ...]
    counted_by: tuple[str, ...]


def group_of(plan: Plan, layers: Collection[int]) -> Group:
    """The group of a bucket that is used by ``layers``."""
    stages = [s for s in plan.stages if any(s.first_layer <= layer < s.past_last_layer for layer in layers)]
    assert stages, f"no stage of the plan has layers {sorted(layers)}"
    return Group(tuple(n for s in stages for n in s.replicas), tuple(stages[0].replicas))

"""A plan from one node's point of view: its stage, its neighbours, its replica groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from dtfm.node.model.bucket import BucketSpec
from dtfm.protos.plan_pb2 import Plan


@dataclass(frozen=True, slots=True)
class Group:
    """The nodes that hold one bucket, in pipeline order: they reduce its gradients together.

    A layer's bucket is held by the replicas of its stage, a tied parameter's by the replicas of every stage that uses it.
    ``counted_by`` are the replicas of the first of these stages; only they count the bucket in the gradient norm.
    """

    members: tuple[str, ...]
    counted_by: tuple[str, ...]

    def checkpoint_writer(self, bucket: int) -> str:
        """The member that writes the bucket into a checkpoint."""
        return self.counted_by[bucket % len(self.counted_by)]


@dataclass(frozen=True, slots=True)
class Placement:
    """One node's place in a plan. Micro-batches are numbered within a step.

    ``previous`` and ``next`` map each of this node's micro-batches to the node that sends its activation and the node that
    receives its output; they are empty on the first and the last stage. The ``evaluation_*`` maps do the same for held-out
    micro-batches. ``in_flight`` is the most micro-batches that may be forward but not yet backward here. ``groups`` has the
    group of each of the stage's buckets.
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
    groups: Mapping[int, Group]

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def peers(self) -> set[str]:
        """The nodes that this node sends tensors to or receives them from."""
        ways = (self.previous, self.next, self.evaluation_previous, self.evaluation_next)
        neighbours = {node for way in ways for node in way.values()}
        return (neighbours | {m for group in self.groups.values() for m in group.members}) - {self.node}


def placement_of(
    plan: Plan, node: str, evaluation_micro_batches: int, buckets: Iterable[BucketSpec] = ()
) -> Placement | None:
    """``node``'s placement, or None when the plan leaves it idle. ``buckets`` are the model's.

    Routes take consecutive micro-batches in plan order; held-out micro-batches are dealt out to the routes in turn.
    """
    stage = next((i for i, s in enumerate(plan.stages) if node in s.replicas), None)
    if stage is None:
        return None
    layers = (plan.stages[stage].first_layer, plan.stages[stage].past_last_layer)
    training_route = [r for r, route in enumerate(plan.routes) for _ in range(route.micro_batches)]
    evaluation_route = [e % len(plan.routes) for e in range(evaluation_micro_batches)]
    mine = _micro_batches(plan, node, stage, training_route)
    held_out = _micro_batches(plan, node, stage, evaluation_route)
    return Placement(
        node=node,
        generation=plan.generation,
        stage=stage,
        stages=len(plan.stages),
        layers=layers,
        replicas=tuple(plan.stages[stage].replicas),
        micro_batches=mine,
        previous=_neighbours(plan, mine, training_route, stage - 1),
        next=_neighbours(plan, mine, training_route, stage + 1),
        evaluation_micro_batches=held_out,
        evaluation_previous=_neighbours(plan, held_out, evaluation_route, stage - 1),
        evaluation_next=_neighbours(plan, held_out, evaluation_route, stage + 1),
        # Unless the plan says: one per stage from here on, and as many again to keep links and devices busy.
        in_flight=plan.stages[stage].in_flight or 2 * (len(plan.stages) - stage),
        groups={spec.index: group_of(plan, spec.layers) for spec in buckets if spec.used_by(*layers)},
    )


def group_of(plan: Plan, layers: Collection[int]) -> Group:
    """The group of a bucket that ``layers`` use."""
    stages = [s for s in plan.stages if any(s.first_layer <= layer < s.past_last_layer for layer in layers)]
    assert stages, f"no stage of the plan has layers {sorted(layers)}"
    return Group(tuple(n for s in stages for n in s.replicas), tuple(stages[0].replicas))


def _micro_batches(plan: Plan, node: str, stage: int, routes: list[int]) -> tuple[int, ...]:
    return tuple(m for m, r in enumerate(routes) if plan.routes[r].nodes[stage] == node)


def _neighbours(plan: Plan, micro_batches: tuple[int, ...], routes: list[int], stage: int) -> dict[int, str]:
    if not 0 <= stage < len(plan.stages):
        return {}
    return {m: plan.routes[routes[m]].nodes[stage] for m in micro_batches}

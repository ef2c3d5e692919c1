"""The stages that the caller asks for, checked against the cluster and the workload."""

from __future__ import annotations

from dataclasses import dataclass

from dtfm.scheduler.model.decision import Infeasible
from dtfm.scheduler.model.problem import Groups, Problem

MOST_STAGES = 128
"""Largest number of stages of a plan."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the caller fixed. ``sizes`` are the replicas per stage in pipeline order, ``stages`` is the number of
    stages; None leaves them free."""

    stages: int | None = None
    sizes: tuple[int, ...] | None = None
    most_stages: int = 1

    def admits(self, groups: Groups) -> bool:
        """Whether the groups have this shape."""
        if not all(groups) or not 1 <= len(groups) <= self.most_stages:
            return False
        if self.sizes is not None:
            return tuple(len(group) for group in groups) == self.sizes
        return self.stages is None or len(groups) == self.stages


def requested_shape(problem: Problem, stages: int | tuple[int, ...] | None) -> Shape:
    """The shape that plans must have.

    Raises ValueError when no plan can have it, and Infeasible when the cluster has too few nodes.
    """
    nodes, layers = len(problem.flops), len(problem.workload.layers)
    most = min(nodes, layers, MOST_STAGES)
    if stages is None:
        return Shape(most_stages=most)
    count = stages if isinstance(stages, int) else len(stages)
    pinned = None if isinstance(stages, int) else stages
    if count < 1 or (pinned is not None and min(pinned, default=0) < 1):
        raise ValueError(f"stages is {stages}; there must be at least one, each with at least one replica")
    if count > MOST_STAGES:
        raise ValueError(f"stages is {count}; at most {MOST_STAGES} are possible")
    if count > layers:
        raise ValueError(f"stages is {stages}; the model has {layers} layers, and a stage needs one")
    needed = count if pinned is None else sum(pinned)
    if needed > nodes:
        raise Infeasible(
            f"{needed} nodes are needed for stages {stages}; the cluster has {nodes}: {needed - nodes} too few"
        )
    return Shape(stages=count, sizes=pinned, most_stages=count)

"""How long the nodes of a plan take for their share of a step, beside the plan's own estimate."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.steps import StepCommitted
from dtfm.scheduler.model.memory import Checkpointing, Keeping
from dtfm.scheduler.model.plan import Plan

SLOW = 1.5
"""A node is slow if it takes this number of times its planned seconds, and the other nodes do not."""
STEPS_IN_A_ROW = 3
"""The number of timed steps in a row that make a node slow: a single one is noise."""
MEAN_OF = 5
"""``Slow.times`` is a mean over this number of timed steps."""


@dataclass(frozen=True, slots=True)
class Slow:
    """A node takes ``times`` its planned seconds. It has been slow in each of the last ``steps`` timed steps, ``since`` then."""

    since: float
    times: float
    steps: int = 1

    @property
    def is_certain(self) -> bool:
        return self.steps >= STEPS_IN_A_ROW


def planned_seconds(ledger: Ledger, plan: Plan, speeds: Mapping[str, float]) -> dict[str, float]:
    """The seconds that each node of the plan should compute in a step. ``speeds``: FLOP/s by node."""
    if ledger.described is None:
        return {}
    workload, found = ledger.described.workload, dict[str, float]()
    for stage in plan.stages:
        forward = sum(layer.forward_flops for layer in workload.layers[slice(*stage.layers)])
        keeping = stage.keeping or (Keeping(),) * len(stage.replicas)
        for node, load, kept in zip(stage.replicas, stage.loads, keeping, strict=True):
            passes = workload.passes + (kept.checkpointing is Checkpointing.LAYER)
            if load and speeds.get(node, 0) > 0:
                found[node] = passes * forward * load / speeds[node]
    return found


def times_planned(planned: Mapping[str, float], step: StepCommitted) -> dict[str, float]:
    """By node, how many times its planned seconds it computed in this step."""
    took = step.compute_seconds
    return {node: took[node] / seconds for node, seconds in planned.items() if took.get(node, 0) > 0 and seconds > 0}


def slow_after(before: Mapping[str, Slow], times: Mapping[str, float], time: float) -> dict[str, Slow]:
    """The slow nodes after one more timed step, which was committed at that time. Of two nodes in the middle, the faster
    counts."""
    if len(times) < 2:
        return {}
    usual = statistics.median_low(times.values())
    found = {}
    for node, each in times.items():
        if each >= SLOW and each >= SLOW * usual:
            was = before.get(node, Slow(time, each, 0))
            steps = was.steps + 1
            found[node] = Slow(was.since, was.times + (each - was.times) / min(steps, MEAN_OF), steps)
    return found

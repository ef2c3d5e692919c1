"""A plan that continues at once when nodes are gone: other nodes take over only what the missing ones did.

All other nodes keep their layers and micro-batch numbers, so that their work on the current step still counts. The
plan's speed matters little, because a better one can be searched for while it trains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import groupby

from dtfm.scheduler.assemble.evaluate import memory_shortfall, missing_links
from dtfm.scheduler.model.plan import Plan, Route, Stage
from dtfm.scheduler.model.problem import Problem, draft_of


def rerouted(plan: Plan, problem: Problem, holders: Sequence[Collection[str]]) -> Plan | None:
    """``plan`` on those of its nodes that the cluster still has, or None where that is impossible.

    An idle node that holds the stage's state replaces a missing node, the fastest first. ``holders`` are the nodes that hold
    each layer. Without such a node, the missing node's micro-batches go to the other replicas of its stage, each to the one
    that finishes its own earliest. Returns None when a stage has no replica left, or when a link or memory would be missing.
    """
    speed = {node.id: node.flops for node in problem.cluster.nodes}
    idle = sorted(speed.keys() - set(plan.nodes), key=lambda node: (-speed[node], node))
    successor = {node: node for node in plan.nodes if node in speed}
    for stage in plan.stages:
        for gone in [node for node in stage.replicas if node not in speed]:
            if able := [node for node in idle if all(node in holders[layer] for layer in range(*stage.layers))]:
                successor[gone] = able[0]
                idle.remove(able[0])
    stages = []
    for stage in plan.stages:
        replicas = tuple(successor[node] for node in stage.replicas if node in successor)
        # A newcomer may have less memory. The least number in flight (0) fits every feasible plan.
        stages.append(Stage(stage.layers, replicas, stage.in_flight if set(replicas) <= set(stage.replicas) else 0))
    if not all(stage.replicas for stage in stages):
        return None
    chains = [
        [successor.get(node, "") for node in route.nodes] for route in plan.routes for _ in range(route.micro_batches)
    ]
    for place, stage in enumerate(stages):
        loads = Counter(chain[place] for chain in chains)
        for chain in chains:
            if not chain[place]:
                chain[place] = min(stage.replicas, key=lambda node: ((loads[node] + 1) / speed[node], node))
                loads[chain[place]] += 1
    repaired = replace(
        plan,
        stages=tuple(stages),
        routes=tuple(Route(tuple(chain), len(list(same))) for chain, same in groupby(chains)),
        idle=tuple(name for name in problem.cluster.ids if name in idle),
    )
    draft = draft_of(repaired, problem.cluster)
    possible = not missing_links(problem, draft) and not memory_shortfall(problem, draft.groups, draft.cuts)
    return repaired if possible else None

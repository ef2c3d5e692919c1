"""A plan that goes on at once when nodes are gone: only what they did is done by others.

Every other node keeps its layers and its micro-batches by number, so that what it has done of the step in hand still counts.
How good the plan is matters little: a better one can be looked for while it trains.
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
    """``plan`` over those of its nodes that the cluster still has. An idle node that has the stage's state (``holders``: per
    layer) takes the place of one that is gone, the fastest first; else its micro-batches go to the others of its stage, each
    to the one that is through with its own earliest. None when a stage is left with nobody, or a link or memory would be
    missing.
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
        # A newcomer may have less memory: whatever is feasible at all allows the least in flight.
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
    mended = replace(
        plan,
        stages=tuple(stages),
        routes=tuple(Route(tuple(chain), len(list(same))) for chain, same in groupby(chains)),
        idle=tuple(name for name in problem.cluster.ids if name in idle),
    )
    draft = draft_of(mended, problem.cluster)
    possible = not missing_links(problem, draft) and not memory_shortfall(problem, draft.groups, draft.cuts)
    return mended if possible else None

"""A plan that continues right away when nodes are gone: other nodes take over only the work of the missing ones.

All other nodes keep their layers and micro-batch numbers, so that their work on the current step still counts. The plan's speed
matters little, because a better plan can be searched for while it trains.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dtfm.scheduler.assemble.evaluate import bare_stages, missing_links
from dtfm.scheduler.model.keeping import has_room, held_by, shortest
from dtfm.scheduler.model.memory import Keeping, in_flight
from dtfm.scheduler.model.plan import Plan, Stage, Takeover, unless_usual
from dtfm.scheduler.model.problem import Problem, draft_of


def rerouted(plan: Plan, problem: Problem, holders: Sequence[Collection[str]]) -> Plan | None:
    """``plan`` on its nodes that the cluster still has, or None if that is impossible.

    An idle node that holds the stage's state and has room to train it replaces a missing node. If the stage needs a proven
    node, a proven one comes first, then the fastest. ``holders`` are the nodes that hold each layer. Without such an idle node,
    the missing node's micro-batches go to the other replicas of its stage. Each micro-batch goes to the replica that finishes
    its own earliest.

    Returns None in three cases:
    - A stage has no replica left.
    - A link or memory would be missing.
    - A stage that lost a node has no proven one, although there are as many proven nodes as stages.

    Nodes that stay keep what they need as before. A newcomer keeps it as in a new plan.
    """
    speed = {node.id: node.flops for node in problem.cluster.nodes}
    proven = {node.id for node in problem.cluster.nodes if node.proven}
    idle = sorted(speed.keys() - set(plan.nodes), key=lambda node: (-speed[node], node))
    repaired = plan
    for index, stage in enumerate(plan.stages):
        for gone in [node for node in stage.replicas if node not in speed]:
            taken = plan.seats(index)  # a node that was lost here and is back cannot have a second seat under its name
            holding = [node for node in idle if all(node in holders[layer] for layer in range(*stage.layers))]
            bare = proven.isdisjoint(repaired.stages[index].replicas)
            first = sorted(holding, key=lambda node: node not in proven) if bare else holding
            able = (node for node in first if node not in taken and _has_room(problem, plan, index, node))
            if (new := next(able, None)) is not None:
                repaired = _replaced(repaired, index, gone, new, problem)
                idle.remove(new)
    for index, stage in enumerate(repaired.stages):
        left = {node: speed[node] for node in stage.replicas if node in speed}
        if not left:
            return None
        for gone in [node for node in stage.replicas if node not in speed]:
            repaired = _taken_over(repaired, index, gone, left)
    at_work = set(repaired.nodes)
    repaired = replace(
        repaired,
        idle=tuple(name for name in problem.cluster.ids if name in idle),
        frees_first=tuple(name for name in repaired.frees_first if name in at_work),
    )
    draft = draft_of(repaired, problem.cluster)
    if missing_links(problem, draft) or not has_room(problem, draft):
        return None
    lost = {index for index, stage in enumerate(plan.stages) if not speed.keys() >= set(stage.replicas)}
    could_share = len(proven) >= len(plan.stages)
    return None if could_share and lost.intersection(bare_stages(problem, draft.groups)) else repaired


def _has_room(problem: Problem, plan: Plan, index: int, node: str) -> bool:
    """Whether the node has memory for stage ``index``. A node may hold a copy of the state although it could not train the
    stage."""
    fewest = min(in_flight(index, len(plan.stages)), problem.workload.micro_batches)
    return shortest(problem, plan.stages[index].layers, fewest, problem.cluster.ids.index(node)).bytes == 0


def _replaced(plan: Plan, index: int, gone: str, new: str, problem: Problem) -> Plan:
    """The plan with ``new`` in the seat of ``gone``, a replica of stage ``index``."""

    def name(node: str) -> str:
        return new if node == gone else node

    stage = plan.stages[index]
    # A newcomer may have less memory. The least number in flight fits every feasible plan.
    least = in_flight(index, len(plan.stages))
    held = tuple(
        least if node == gone else number for node, number in zip(stage.replicas, stage.in_flight, strict=False)
    )
    fewest = min(least, problem.workload.micro_batches)
    own = held_by(problem, stage.layers, fewest, fewest, problem.cluster.ids.index(new)).keeping
    keeping = stage.keeping or (Keeping(),) * len(stage.replicas)
    kept = tuple(own if node == gone else way for node, way in zip(stage.replicas, keeping, strict=True))
    changed = replace(stage, replicas=tuple(map(name, stage.replicas)), in_flight=held, keeping=unless_usual(kept))
    flows = list(plan.flows)
    if index:
        flows[index - 1] = tuple(replace(flow, receiver=name(flow.receiver)) for flow in flows[index - 1])
    if index < len(flows):
        flows[index] = tuple(replace(flow, sender=name(flow.sender)) for flow in flows[index])
    takeovers = tuple(
        replace(takeover, heirs=tuple((name(heir), count) for heir, count in takeover.heirs))
        if takeover.stage == index
        else takeover
        for takeover in plan.takeovers
    )
    return replace(plan, stages=_with(plan.stages, index, changed), flows=tuple(flows), takeovers=takeovers)


def _taken_over(plan: Plan, index: int, gone: str, speed: Mapping[str, float]) -> Plan:
    """The plan without ``gone``, a replica of stage ``index``. Only nodes with a ``speed`` (FLOP/s) may be heirs."""
    stage = plan.stages[index]
    loads = dict(zip(stage.replicas, stage.loads, strict=True))
    given = dict.fromkeys((node for node in stage.replicas if node in speed), 0)
    for _ in range(loads.pop(gone)):
        heir = min(given, key=lambda node: ((loads[node] + 1) / speed[node], node))
        given[heir] += 1
        loads[heir] += 1
    heirs = tuple((node, count) for node, count in given.items() if count)
    place = stage.replicas.index(gone)
    takeover = Takeover(index, gone, place, heirs)
    held = stage.in_flight[:place] + stage.in_flight[place + 1 :]
    kept = unless_usual(stage.keeping[:place] + stage.keeping[place + 1 :])
    changed = replace(stage, replicas=tuple(loads), loads=tuple(loads.values()), in_flight=held, keeping=kept)
    return replace(plan, stages=_with(plan.stages, index, changed), takeovers=(*plan.takeovers, takeover))


def _with(stages: tuple[Stage, ...], index: int, stage: Stage) -> tuple[Stage, ...]:
    return (*stages[:index], stage, *stages[index + 1 :])

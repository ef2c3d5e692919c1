"""Where replanning starts: the incumbent's stages, repaired after nodes joined and left."""

from __future__ import annotations

from collections.abc import Iterator

from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.population import Member
from dtfm.scheduler.model.problem import Groups, Problem
from dtfm.scheduler.search.seeds import Start

NEWCOMERS = 6
"""Number of idle nodes that are tried in every stage, the fastest first."""


def survivors(plan: Plan, problem: Problem) -> Groups:
    """The plan's groups without the nodes that have left; a group may be empty."""
    number = {name: index for index, name in enumerate(problem.cluster.ids)}
    return tuple(tuple(number[node] for node in stage.replicas if node in number) for stage in plan.stages)


def repaired(plan: Plan, problem: Problem) -> Iterator[Start]:
    """The survivors with the layers that they hold, the same with one idle node more, then the survivors with new cuts.

    A stage without any replica left is given to an idle node, or to a node of a larger group; or its layers are divided among
    the other stages.
    """
    left = survivors(plan, problem)
    cuts = (0, *(stage.layers[1] for stage in plan.stages))
    held = {node for group in left for node in group}
    fastest = sorted(range(len(problem.flops)), key=lambda node: (-problem.flops[node], node))
    idle = [node for node in fastest if node not in held][:NEWCOMERS]
    remaining = tuple(group for group in left if group)
    if cuts[-1] != len(problem.activation):
        left = ()  # another workload: their layers are of no use
    if left and all(left):
        yield left, cuts
        for node in idle:
            for stage in range(len(left)):
                yield _with(left, stage, node), cuts
    elif any(left):
        empty = next(stage for stage, group in enumerate(left) if not group)
        spare = [group[0] for group in left if len(group) > 1]
        for node in (*idle, *spare):
            filled = _with(tuple(tuple(other for other in group if other != node) for group in left), empty, node)
            if all(filled):
                yield filled, cuts
    if remaining:
        yield remaining, None


def readmitted(member: Member, problem: Problem) -> Iterator[Start]:
    """The member of a kept population without the nodes that have left. Nothing, if it has several islands or a stage has no
    node left; new cuts, if it was for a model of another length."""
    if len(member.islands) != 1:
        return
    (island,) = member.islands
    number = {name: index for index, name in enumerate(problem.cluster.ids)}
    groups = tuple(tuple(number[node] for node in stage if node in number) for stage in island.stages)
    if all(groups):
        yield groups, island.cuts if island.cuts[-1] == len(problem.activation) else None


def _with(groups: Groups, stage: int, node: int) -> Groups:
    return (*groups[:stage], (*groups[stage], node), *groups[stage + 1 :])

"""Where replanning starts: the incumbent, and the members of the population, repaired after nodes joined and left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dtfm.scheduler.assemble.evaluate import Evaluator
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.population import Island, Population
from dtfm.scheduler.model.problem import Groups, Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.search.seed_groups import Start

NEWCOMERS = 6
"""Number of idle nodes that are tried in a stage, the fastest first."""


def survivors(plan: Plan, problem: Problem) -> Groups:
    """The plan's groups without the nodes that have left; a group may be empty."""
    number = {name: index for index, name in enumerate(problem.cluster.ids)}
    return tuple(tuple(number[node] for node in stage.replicas if node in number) for stage in plan.stages)


def repaired(plan: Plan, problem: Problem) -> Iterator[Start]:
    """Three groupings: the survivors with the layers that they hold; the same with one idle node more; the survivors with new
    cuts.

    A stage without any replica left gets an idle node, or a node of a larger group. Or its layers are divided among the other
    stages.
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
            filled = _with(_without(left, node), empty, node)
            if all(filled):
                yield filled, cuts
    if remaining:
        yield remaining, None


def adapted(population: Population, evaluator: Evaluator, shape: Shape, late: Callable[[], bool]) -> Iterator[Start]:
    """The members of a population after nodes have left and joined, the best first; at least one, then until it is ``late``.

    Members of several islands, and members without any node left, are left out.
    """
    plain = [member.islands[0] for member in population if len(member.islands) == 1]
    known = {node for island in plain for stage in island.stages for node in stage}
    flops = evaluator.problem.flops
    fastest = sorted(range(len(flops)), key=lambda node: (-flops[node], node))
    newcomers = [node for node in fastest if evaluator.problem.cluster.ids[node] not in known][:NEWCOMERS]
    some = False
    for island in plain:
        if some and late():
            return
        if (start := _adapted(island, evaluator, shape, fastest, newcomers)) is not None:
            some = True
            yield start


def _adapted(
    island: Island, evaluator: Evaluator, shape: Shape, fastest: Sequence[int], newcomers: Sequence[int]
) -> Start | None:
    """Takes the nodes that have left out of the island, repairs it and puts newcomers in. The least estimate decides each time.

    A stage that lacks a node gets an idle one or one of a larger group, or its layers go to its neighbours. Each newcomer joins
    a stage, takes the place of a stage's slowest node, or stays idle. In the end the model is cut again, if the new cuts are
    better.
    """
    problem = evaluator.problem
    number = {name: index for index, name in enumerate(problem.cluster.ids)}
    groups = tuple(tuple(number[node] for node in stage if node in number) for stage in island.stages)
    if island.cuts[-1] != len(problem.activation):  # another model: its groups may still be of use
        groups = tuple(group for group in groups if group)
        return (groups, None) if groups else None
    if not any(groups) or (shape.sizes is not None and len(shape.sizes) != len(groups)):
        return None

    def best(options: list[tuple[Groups, tuple[int, ...]]]) -> tuple[Groups, tuple[int, ...]]:
        return min(options, key=lambda option: evaluator.estimated(*option).price)

    sizes, cuts = shape.sizes or (1,) * len(groups), island.cuts
    while (lacks := next((at for at, group in enumerate(groups) if len(group) < sizes[at]), None)) is not None:
        used = {node for group in groups for node in group}
        idle = [node for node in fastest if node not in used][:NEWCOMERS]
        options = [(_with(groups, lacks, node), cuts) for node in idle]
        if shape.sizes is None:
            spare = [max(group, key=fastest.index) for group in groups if len(group) > 1]
            options += [(_with(_without(groups, node), lacks, node), cuts) for node in spare]
            if shape.stages is None:
                fewer = (*groups[:lacks], *groups[lacks + 1 :])
                options += [
                    (fewer, (*cuts[:cut], *cuts[cut + 1 :])) for cut in (lacks, lacks + 1) if 0 < cut < len(cuts) - 1
                ]
        if not options:
            return None
        groups, cuts = best(options)
        sizes = shape.sizes or (1,) * len(groups)
    used = {node for group in groups for node in group}
    for node in newcomers:
        if node in used:
            continue
        added = [_with(groups, stage, node) for stage in range(len(groups))] if shape.sizes is None else []
        slowest = [max(group, key=fastest.index) for group in groups]
        added += [_with(_without(groups, other), stage, node) for stage, other in enumerate(slowest)]
        groups, cuts = best([(groups, cuts), *((option, cuts) for option in added)])
    again = evaluator.estimated(groups, None)
    return groups, again.draft.cuts if again.price < evaluator.estimated(groups, cuts).price else cuts


def _without(groups: Groups, node: int) -> Groups:
    return tuple(tuple(other for other in group if other != node) for group in groups)


def _with(groups: Groups, stage: int, node: int) -> Groups:
    return (*groups[:stage], (*groups[stage], node), *groups[stage + 1 :])

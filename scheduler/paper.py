"""Plans by the paper's objective (arXiv 2206.01288, section 3): equal groups, with the least data-parallel and pipeline costs.

The search is the same as for other plans, with another price and pinned sizes. Devices, memory and overlap do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

from dtfm.scheduler.assemble.equal_groups import PaperEvaluator, even_cuts
from dtfm.scheduler.assemble.evaluate import Evaluator, Improved
from dtfm.scheduler.assemble.infeasible import shortfall
from dtfm.scheduler.bound.paper import paper_bound
from dtfm.scheduler.cost.in_flight import depths
from dtfm.scheduler.cost.paper import paper_seconds
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Decision, Infeasible, Predicted, Reason
from dtfm.scheduler.model.keeping import keepings
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.request import requested_shape
from dtfm.scheduler.model.workload import PaperCosts, Workload
from dtfm.scheduler.search.search import Budget, TimeUsed, search

AS_GOOD = 1 + 1e-9
"""A plan that costs at most this many times the bound is proven best."""
SENTENCE = "By the paper's cost model: equal groups, and the links alone."


def plan_by_paper(
    cluster: Cluster,
    workload: Workload,
    *,
    stages: int | tuple[int, ...] | None = None,
    seed: int = 0,
    evaluations: int | None = None,
    time_used: TimeUsed | None = None,
    generation: int = 0,
    threads: int = 1,
    improved: Improved = lambda evaluations, seconds: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Decision:
    """Assigns nodes to equal groups, and orders the groups, at the least cost by the paper's model. schedule.schedule explains
    the arguments. The decision's bound is a bound on Predicted.paper.

    The workload's ``paper`` costs name the groups. Without such costs there are ``stages`` groups of equal size, and costs
    follow from the layers. Nodes beyond the groups stay idle. Layers are cut evenly. Raises Infeasible if a link is missing
    that any plan needs, or if the plan has no room in memory. Raises ValueError for groups that are not equal.
    """
    nodes = tuple(replace(node, proven=True) for node in cluster.nodes)
    cluster = replace(cluster, nodes=nodes)
    workload = replace(workload, paper=paper_costs(workload, len(nodes), stages))
    assert workload.paper is not None
    problem = Problem(cluster, workload)
    shape = requested_shape(problem, (workload.paper.replicas,) * workload.paper.stages)
    evaluator = PaperEvaluator(problem, keep_idle_hands=True, improved=improved)
    bound = paper_bound(problem)
    if not math.isfinite(bound):
        raise Infeasible(f"the links that exist do not suffice for {workload.paper.stages} stages of equal size")
    budget = Budget(time_used, evaluations, lambda: stopped() or evaluator.told <= AS_GOOD * bound)
    found = search(evaluator, shape, [], None, Random(seed), budget, threads)
    groups = found.best.draft.groups
    seconds = paper_seconds(problem.paper_exchanges(), groups)
    if not math.isfinite(seconds.total):
        raise Infeasible("the best groups that were found need a link that does not exist")
    best = Evaluator(problem, keep_idle_hands=True).simulated(groups, even_cuts(problem, len(groups)))
    if not best.feasible:
        raise Infeasible(
            f"the paper's cost model counts no memory and no device, and its plan does not work: {shortfall(problem, best)} "
            "Plan with --objective step"
        )
    draft = best.draft
    plan = draft.plan(cluster, depths(problem, draft), keepings(problem, draft), generation)
    predicted = Predicted(best.seconds, 0.0, paper=seconds)
    return Decision(plan, predicted, bound, Reason.FIRST, SENTENCE, evaluator.spent)


def paper_costs(workload: Workload, nodes: int, stages: int | tuple[int, ...] | None) -> PaperCosts:
    """The workload's ``paper`` costs. Without such costs, ``stages`` gives them from the layers: a stage has its part of all
    gradients, and a pipeline carries the largest activation of each of its micro-batches.

    Raises ValueError if neither is given, or if groups would not be equal.
    """
    if isinstance(stages, tuple):
        if len(set(stages)) > 1:
            raise ValueError(
                f"objective paper: stages is {stages}; the paper's groups are equal, so all must be the same"
            )
        stages = len(stages)
    costs = workload.paper
    if costs is not None and stages not in (None, costs.stages):
        raise ValueError(f"stages is {stages}; the workload's `paper` names {costs.stages} stages of {costs.replicas}")
    if costs is None and stages is None:
        raise ValueError("objective paper: the workload has no `paper` costs; add them, or say --stages")
    count = costs.stages if costs is not None else stages
    assert count is not None
    if nodes % count:
        raise ValueError(
            f"objective paper: {nodes} nodes make no {count} equal groups; there must be a multiple of {count} nodes"
        )
    if costs is not None:
        return costs
    replicas = nodes // count
    gradients = sum(layer.parameter_bytes for layer in workload.layers) / count
    activations = max(layer.activation_bytes for layer in workload.layers) * workload.micro_batches / replicas
    return PaperCosts(count, replicas, gradients / 1e9, activations / 1e9)

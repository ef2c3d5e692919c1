"""The best of all plans of a small cluster according to the simulation; the scheduler's plans are compared with it."""

from __future__ import annotations

from dtfm.scheduler.assemble.evaluate import Evaluator
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.problem import Problem, draft_of
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.search.exact import improve
from tests.scheduler.enumeration import all_cuts, all_groups

UNLIMITED = 1_000_000


def enumerated_seconds(cluster: Cluster, workload: Workload, found: Plan) -> float:
    """Simulates every choice of groups with every cut.

    Five nodes and 5 layers have 1,081 choices of groups, six have
    8,645, eight nodes and 3 layers 52,925; each has up to 6 cuts.
    """
    layers, nodes = len(workload.layers), len(cluster.nodes)
    evaluator = Evaluator(Problem(cluster, workload), keep_idle_hands=False)
    draft = draft_of(found, cluster)
    best = evaluator.simulated(draft.groups, draft.cuts).seconds
    for groups in all_groups(nodes, Shape(most_stages=min(nodes, layers))):
        for cuts in all_cuts(layers, len(groups)).tolist():
            best = min(best, evaluator.simulated(groups, tuple(cuts)).seconds)
    return best


def branched_seconds(cluster: Cluster, workload: Workload, found: Plan) -> float:
    """The same, much faster: with the scheduler's own branch and bound, without a limit, so that nothing can be missed."""
    evaluator = Evaluator(Problem(cluster, workload), keep_idle_hands=False)
    draft = draft_of(found, cluster)
    start = evaluator.simulated(draft.groups, draft.cuts)
    shape = Shape(most_stages=min(len(cluster.nodes), len(workload.layers)))
    best, _ = improve(evaluator, shape, start, UNLIMITED, expired=lambda: False)
    return best.seconds

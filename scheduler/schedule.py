"""The scheduler's entry point."""

from __future__ import annotations

import math
from random import Random

from dtfm.scheduler.assemble.compact import CompactCluster, shrink
from dtfm.scheduler.assemble.evaluate import Evaluator, Improved
from dtfm.scheduler.assemble.infeasible import shortfall
from dtfm.scheduler.cost.bounds import iteration_bound, work_bound
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Decision, Infeasible, Objective
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.problem import Groups, Problem
from dtfm.scheduler.model.request import Shape, requested_shape
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.paper.bound import paper_bound
from dtfm.scheduler.paper.search import search_paper
from dtfm.scheduler.replan.replan import Incumbent, decide
from dtfm.scheduler.replan.warm_start import repaired
from dtfm.scheduler.search.search import Deadline, search
from dtfm.scheduler.search.seeds import Start, dealt, seed_groups

EVALUATIONS = {Objective.ITERATION: 4_000, Objective.PAPER: 60_000}
"""Default budgets. An evaluation takes about 1 ms with the iteration objective, and 0.05 ms with the paper's."""
HORIZON_SECONDS = 1800.0
"""Default seconds that a plan is expected to last before a node joins or leaves."""


def schedule(
    cluster: Cluster | CompactCluster,
    workload: Workload,
    incumbent: Plan | None = None,
    *,
    stages: int | tuple[int, ...] | None = None,
    objective: Objective = Objective.ITERATION,
    seed: int = 0,
    evaluations: int | None = None,
    deadline: Deadline | None = None,
    generation: int = 0,
    horizon: float = HORIZON_SECONDS,
    tight_bound: bool = True,
    improved: Improved = lambda evaluations, seconds: None,
) -> Decision:
    """Assigns layers and micro-batches to nodes, and says why.

    ``stages`` None lets the scheduler choose the number of stages; a number fixes it; a tuple fixes the replicas of each stage
    in pipeline order, and all other nodes stay idle. The paper objective takes both from ``workload.paper``.

    The same arguments give the same decision, unless ``deadline`` ends the search early: it is called between evaluations and
    returns True when time is up. Even then a plan is made. ``evaluations`` bounds the search; None means EVALUATIONS.

    A new plan gets ``generation``; an ``incumbent`` that is kept keeps its own. A plan that replaces the incumbent must win
    back the cost of state transfer within ``horizon`` seconds, the time that a plan is expected to stand. ``improved`` is called
    for each plan that is better than all before, with the evaluations so far and the plan's seconds (the cost of state transfer
    per step included).

    ``lower_bound_seconds`` of the decision is tight with ``tight_bound``, which takes ten seconds for 256 nodes and 130
    layers; without, it counts devices alone and takes no time. The paper objective always has its own bound.

    A compact cluster is planned in miniature: from scratch, with the iteration objective, and with ``stages`` None or a
    number.

    Raises Infeasible when no plan fits, and ValueError when ``stages`` or ``horizon`` is impossible.
    """
    if isinstance(cluster, CompactCluster):
        if incumbent is not None or objective is not Objective.ITERATION or isinstance(stages, tuple):
            raise ValueError(
                f"a compact network of {len(cluster.nodes)} nodes is planned from scratch, with the iteration objective and "
                "replicas chosen by the scheduler; leave out the incumbent, objective paper and replicas per stage"
            )
        small = shrink(cluster, workload)
        found = schedule(
            small.cluster,
            small.workload,
            stages=stages,
            seed=seed,
            evaluations=evaluations,
            deadline=deadline,
            generation=generation,
            horizon=horizon,
            tight_bound=tight_bound,
            improved=improved,
        )
        return small.expand(found)
    if not (math.isfinite(horizon) and horizon > 0):
        raise ValueError(f"horizon is {horizon}; it must be a finite number of seconds above 0")
    expired = deadline or (lambda: False)
    budget = EVALUATIONS[objective] if evaluations is None else evaluations
    problem = Problem(cluster, workload)
    shape = requested_shape(problem, stages, objective)
    evaluator = Evaluator(problem, keep_idle_hands=shape.sizes is not None, improved=improved)
    standing = None if incumbent is None else Incumbent.of(problem, incumbent, shape)
    starts = [] if incumbent is None else list(repaired(incumbent, problem))
    rng = Random(seed)
    spent = 0
    if objective is Objective.PAPER:
        bound = paper_bound(problem)
        seeds = _paper_starts(problem, shape, starts, rng)
        groups, spent = search_paper(problem, seeds, rng, budget, expired, bound, improved)
        best = Evaluator(problem, keep_idle_hands=True).simulated(groups)
    else:
        bound = iteration_bound(problem) if tight_bound else work_bound(workload, problem.flops)
        if standing is not None:
            evaluator.surcharge = standing.surcharge(problem, horizon)
        best = search(evaluator, shape, starts, rng, budget, expired)
    if not best.feasible:
        raise Infeasible(shortfall(problem, best))
    return decide(problem, standing, best.draft, generation, objective, bound, spent + evaluator.spent, horizon)


def _paper_starts(problem: Problem, shape: Shape, starts: list[Start], rng: Random) -> list[Groups]:
    assert shape.sizes is not None
    made = [
        groups for groups in (*(groups for groups, _ in starts), *seed_groups(problem, shape)) if shape.admits(groups)
    ]
    order = list(range(len(problem.flops)))
    for _ in range(4):
        rng.shuffle(order)
        made.append(dealt(order, shape.sizes))
    return made

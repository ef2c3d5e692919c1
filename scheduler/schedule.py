"""The scheduler's entry point."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from dtfm.scheduler.assemble.evaluate import Evaluator, Improved
from dtfm.scheduler.assemble.infeasible import shortfall
from dtfm.scheduler.bound.stage_bounds import AS_GOOD, work_bound
from dtfm.scheduler.cost.in_flight import depths
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import HORIZON_SECONDS, Decision, Infeasible
from dtfm.scheduler.model.keeping import keepings
from dtfm.scheduler.model.plan import Plan, numbered
from dtfm.scheduler.model.population import Population
from dtfm.scheduler.model.problem import Groups, Problem
from dtfm.scheduler.model.request import Shape, requested_shape
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.replan.decision import Standing, decide
from dtfm.scheduler.replan.price import Terms
from dtfm.scheduler.replan.switch import Before, Change
from dtfm.scheduler.replan.warm_start import adapted, repaired
from dtfm.scheduler.search.population import named
from dtfm.scheduler.search.search import Budget, TimeUsed, search
from dtfm.scheduler.search.seed_groups import Start

ALL_EQUAL = " Proven nodes are too few, or have too little memory, for one in each stage: all nodes count as equal."
ADAPTING = 0.05
"""Largest fraction of the budget for adapting the population to today's nodes, after its best member."""
PROVEN_PART = 0.2
"""Fraction of a search's budget for the search among proven nodes, if it finds nothing; usually one of the first seeds works."""
MOST_PROVEN_STEPS = 25_000
"""Steps of the search among proven nodes, if there is no budget."""


def schedule(
    cluster: Cluster,
    workload: Workload,
    incumbent: Plan | None = None,
    *,
    population: Population = (),
    stages: int | tuple[int, ...] | None = None,
    seed: int = 0,
    evaluations: int | None = None,
    time_used: TimeUsed | None = None,
    generation: int = 0,
    horizon: float = HORIZON_SECONDS,
    overhead: float = 0.0,
    uncertainty: float = 0.0,
    threads: int = 1,
    improved: Improved = lambda evaluations, seconds: None,
    stopped: Callable[[], bool] = lambda: False,
    held: Plan | None = None,
) -> Decision:
    """Assigns layers and micro-batches to nodes, and says why.

    ``stages``: None lets the scheduler choose the number of stages. A number fixes it. A tuple fixes the replicas of each stage
    in pipeline order; all other nodes stay idle.

    ``population``: the last population of the search before (Decision.population). This search starts there too. It repairs
    each member whose nodes have left, and adds newcomers. Members of several islands do not count.

    ``time_used`` returns the fraction of the time for planning that is used up. The search paces itself by it and ends at 1. A
    plan is made even when it is 1 from the start. ``evaluations`` limits the number of plans that are tried. With neither, the
    search ends when a longer one would hardly help. Without ``time_used`` the same arguments give the same decision.
    ``threads``, the number of walks at the same time, does not change it.

    A new plan gets ``generation``; an ``incumbent`` that is kept keeps its own. A plan that replaces the incumbent must win
    back the cost of state transfer within ``horizon`` seconds, the time that a plan is expected to stand. ``overhead`` is the
    seconds of each step that the model leaves out, the same for all plans. ``uncertainty``: see `decide`. ``improved`` is
    called for each plan that is better than all before, with the number of evaluations so far and the plan's seconds (without
    the overhead, with the cost of state transfer per step). The search ends soon after ``stopped`` returns True. ``held``: the
    layout whose stages nodes have in memory, if it is not the incumbent. Plans that have room beside these stages come first.

    If some nodes are proven and others are not, and proven nodes alone could train, each stage gets a proven one. An incumbent
    with a stage that has none is replaced if there are as many proven nodes as its stages. If proven nodes alone could not
    train, the sentence says that all nodes count as equal.

    Raises Infeasible when no plan fits, and ValueError when ``stages`` or ``horizon`` is impossible.
    """
    if not (math.isfinite(horizon) and horizon > 0):
        raise ValueError(f"horizon is {horizon}; it must be a finite number of seconds above 0")
    problem = Problem(cluster, workload)
    shape = requested_shape(problem, stages)
    starts = [] if incumbent is None else list(repaired(incumbent, problem))
    note = ""
    if problem.is_mixed:
        witnesses = _proven_alone(problem, shape, seed, time_used, evaluations, stopped)
        if witnesses is None:
            problem, note = Problem(cluster.without_marks(), workload), ALL_EQUAL
        else:
            starts.append(witnesses)
    evaluator = Evaluator(problem, keep_idle_hands=shape.sizes is not None, improved=improved)
    least, change = work_bound(problem), None
    standing = None if incumbent is None else Standing.of(problem, incumbent, shape, held)
    if standing is not None:
        weight = (standing.seconds_per_step(problem) + overhead) / horizon
        change = Change(standing.before, weight, horizon)
    elif held is not None:
        change = Change(Before.of(problem, held), least / horizon, horizon, fetches=False)
    if change is not None:
        evaluator.surcharge = change.surcharge
    fetching = None if change is None else change.fetching()
    budget = Budget(time_used, evaluations, lambda: stopped() or evaluator.told <= AS_GOOD * least)
    starts += adapted(population, evaluator, shape, lambda: budget.past(ADAPTING, evaluator.spent))
    outcome = search(evaluator, shape, starts, fetching, Random(seed), budget, threads)
    best, bound = outcome.best, max(outcome.bound, least) + overhead
    if not best.feasible:
        raise Infeasible(shortfall(problem, best))
    plan = best.draft.plan(cluster, depths(problem, best.draft), keepings(problem, best.draft), generation)
    if incumbent is not None:
        plan = numbered(plan, incumbent.stages[0].island)  # the same island goes on
    decision = decide(
        problem,
        standing,
        plan,
        Terms(overhead=overhead),
        horizon=horizon,
        uncertainty=uncertainty,
        bound=bound,
        spent=evaluator.spent,
    )
    kept = tuple(named(cluster, groups, cuts) for groups, cuts in outcome.population)
    return replace(decision, sentence=decision.sentence + note, population=kept)


def _proven_alone(
    problem: Problem,
    shape: Shape,
    seed: int,
    time_used: TimeUsed | None,
    evaluations: int | None,
    stopped: Callable[[], bool],
) -> Start | None:
    """A start for a search that gives each stage a proven node: a plan that proven nodes alone can train. None if there is no
    such plan, or if this search's part of the budget did not find any.

    Every plan with a proven node in each stage is such a plan with further replicas. The exception is a plan whose stages only
    the other nodes' links connect.
    """
    numbers = np.flatnonzero(problem.proven)
    stages = shape.stages if shape.sizes is None else len(shape.sizes)
    state = problem.workload.least_on_device(problem.parameters_before[-1], problem.orthogonal_before[-1])
    state += problem.frozen_before[-1]
    if (stages or 1) > len(numbers) or problem.memory[numbers].sum() < state:
        return None
    alone = Problem(problem.cluster.only(numbers.tolist()), problem.workload)
    evaluator = Evaluator(alone, keep_idle_hands=False)
    budget = Budget(
        None if time_used is None else lambda: time_used() / PROVEN_PART,
        MOST_PROVEN_STEPS if evaluations is None else int(PROVEN_PART * evaluations),
        lambda: evaluator.best < np.inf or stopped(),
    )
    free = Shape(stages=stages, most_stages=min(shape.most_stages, len(numbers)))
    found = search(evaluator, free, [], None, Random(seed), budget).best
    if not found.feasible:
        return None
    groups = tuple(tuple(int(numbers[node]) for node in group) for group in found.draft.groups)
    if shape.sizes is not None:
        groups = _filled(problem, groups, shape.sizes)
    return groups, found.draft.cuts


def _filled(problem: Problem, groups: Groups, sizes: tuple[int, ...]) -> Groups:
    """The groups, cut or filled up to these sizes: proven nodes come first, then the fastest. Unused nodes fill them up."""
    order = sorted(range(len(problem.flops)), key=lambda node: (not problem.proven[node], -problem.flops[node], node))
    made = [[node for node in order if node in group][:size] for group, size in zip(groups, sizes, strict=True)]
    used = {node for group in made for node in group}
    spare = [node for node in order if node not in used]
    for group, size in zip(made, sizes, strict=True):
        lacking = size - len(group)
        group += spare[:lacking]
        del spare[:lacking]
    return tuple(tuple(sorted(group)) for group in made)

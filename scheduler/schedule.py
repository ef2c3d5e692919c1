"""The scheduler's one entry point."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import numpy as np

from dtfm.scheduler.bounds import iteration_bound
from dtfm.scheduler.cluster import Cluster
from dtfm.scheduler.decision import Decision, Infeasible, Objective, Predicted, Reason
from dtfm.scheduler.estimate import estimate
from dtfm.scheduler.evaluate import Candidate, Evaluator, memory_shortfall, missing_links
from dtfm.scheduler.migrate import migration_seconds
from dtfm.scheduler.moves import Shape
from dtfm.scheduler.paper import PaperSeconds, paper_seconds
from dtfm.scheduler.paper_bound import paper_bound
from dtfm.scheduler.paper_search import search_paper
from dtfm.scheduler.plan import Plan, validate
from dtfm.scheduler.problem import Groups, Problem, draft_of
from dtfm.scheduler.search import Deadline, search
from dtfm.scheduler.seeds import dealt, seed_groups
from dtfm.scheduler.workload import Workload

MOST_STAGES = 64
EVALUATIONS = {Objective.ITERATION: 4_000, Objective.PAPER: 100_000}
MARGIN = 0.03
"""An incumbent is left only for a plan that is faster by more than this part of it: measurements are not better."""


def schedule(
    cluster: Cluster,
    workload: Workload,
    incumbent: Plan | None = None,
    *,
    stages: int | tuple[int, ...] | None = None,
    objective: Objective = Objective.ITERATION,
    seed: int = 0,
    evaluations: int | None = None,
    deadline: Deadline | None = None,
    generation: int = 0,
) -> Decision:
    """Plans who computes what, and says why.

    ``stages`` None lets the scheduler choose their number; a number pins it; a tuple pins the replicas of each stage in
    pipeline order, all other nodes being idle. The paper objective takes both from ``workload.paper``. The same arguments
    give the same decision, unless ``deadline`` (called between evaluations, true when time is up) ends the search early;
    some plan is made even then. A new plan has ``generation``; where ``incumbent`` is kept it keeps its own.

    Raises Infeasible when no plan fits, ValueError when ``stages`` is impossible for this cluster and workload.
    """
    expired = deadline or (lambda: False)
    budget = EVALUATIONS[objective] if evaluations is None else evaluations
    problem = Problem(cluster, workload)
    shape = _shape(problem, stages, objective)
    obstacle = _obstacle(problem, incumbent, shape)
    seeds = _survivors(incumbent, cluster)
    rng = Random(seed)
    evaluator = Evaluator(problem, keep_idle_hands=shape.sizes is not None)
    spent = 0
    if objective is Objective.PAPER:
        bound = paper_bound(problem)
        starts = _paper_seeds(problem, shape, seeds, rng)
        groups, spent = search_paper(problem, starts, rng, budget, expired, bound)
        best = evaluator(groups)
    else:
        bound = iteration_bound(problem)
        best = search(evaluator, shape, seeds, rng, budget, expired)
    if not best.feasible:
        raise Infeasible(_shortfall(problem, best))
    plan = best.draft.plan(cluster, generation)
    validate(plan, cluster.ids, workload)
    return _decide(problem, incumbent, obstacle, plan, objective, bound, spent + evaluator.spent)


def _shape(problem: Problem, stages: int | tuple[int, ...] | None, objective: Objective) -> Shape:
    nodes, layers = len(problem.flops), len(problem.workload.layers)
    most = min(nodes, layers, MOST_STAGES)
    if objective is Objective.PAPER:
        costs = problem.workload.paper
        if costs is None:
            raise ValueError("objective paper: the workload has no `paper` costs; add them or use objective iteration")
        sizes = (costs.replicas,) * costs.stages
        if stages is not None and stages not in (costs.stages, sizes):
            raise ValueError(
                f"stages is {stages}; the workload's `paper` names {costs.stages} stages of {costs.replicas}"
            )
        stages = sizes
    if stages is None:
        return Shape(most_stages=most)
    count = stages if isinstance(stages, int) else len(stages)
    pinned = None if isinstance(stages, int) else stages
    if count < 1 or (pinned is not None and min(pinned, default=0) < 1):
        raise ValueError(f"stages is {stages}; there must be at least one, each with at least one replica")
    if count > MOST_STAGES:
        raise ValueError(f"stages is {count}; at most {MOST_STAGES} are possible")
    if count > layers:
        raise ValueError(f"stages is {stages}; the model has {layers} layers, and a stage needs one")
    needed = count if pinned is None else sum(pinned)
    if needed > nodes:
        raise Infeasible(
            f"{needed} nodes are needed for stages {stages}; the cluster has {nodes}: {needed - nodes} too few"
        )
    return Shape(stages=count, sizes=pinned, most_stages=count)


def _obstacle(problem: Problem, incumbent: Plan | None, shape: Shape) -> Reason | None:
    """Why the incumbent cannot stay; None when it can."""
    if incumbent is None:
        return Reason.FIRST
    ids = set(problem.cluster.ids)
    if not ids.issuperset(incumbent.nodes):
        return Reason.NODE_LOST
    rest = tuple(node for node in problem.cluster.ids if node not in incumbent.nodes)
    try:
        validate(replace(incumbent, idle=rest), ids, problem.workload)
    except ValueError:
        return Reason.REQUESTED
    draft = draft_of(incumbent, problem.cluster)
    if not shape.admits(draft.groups):
        return Reason.REQUESTED
    works = not missing_links(problem, draft) and not memory_shortfall(problem, draft.groups, draft.cuts)
    return None if works else Reason.INFEASIBLE


def _survivors(incumbent: Plan | None, cluster: Cluster) -> list[Groups]:
    """The incumbent's groups without the nodes that are gone, as a start for the search."""
    if incumbent is None:
        return []
    number = {name: index for index, name in enumerate(cluster.ids)}
    groups = (tuple(number[node] for node in stage.replicas if node in number) for stage in incumbent.stages)
    return [tuple(group for group in groups if group)]


def _paper_seeds(problem: Problem, shape: Shape, seeds: list[Groups], rng: Random) -> list[Groups]:
    assert shape.sizes is not None
    made = [groups for groups in (*seeds, *seed_groups(problem, shape)) if shape.admits(groups)]
    order = list(range(len(problem.flops)))
    for _ in range(4):
        rng.shuffle(order)
        made.append(dealt(order, shape.sizes))
    return made


def _decide(
    problem: Problem,
    incumbent: Plan | None,
    obstacle: Reason | None,
    plan: Plan,
    objective: Objective,
    bound: float,
    spent: int,
) -> Decision:
    """Keeps the incumbent where it can stay and the new plan is not better by MARGIN."""
    predicted = _predict(problem, incumbent, plan)
    reason = obstacle or Reason.FASTER
    sentence = _REASONS[reason]
    if incumbent is not None and obstacle is None:
        current = _predict(problem, None, incumbent)
        old, new = _value(current, objective), _value(predicted, objective)
        if new >= old * (1 - MARGIN):
            rest = tuple(node for node in problem.cluster.ids if node not in incumbent.nodes)
            plan, predicted, reason = replace(incumbent, idle=rest), current, Reason.KEPT
            sentence = f"The plan stays: the best other found saves {max(0.0, 1 - new / old):.1%} of a step."
        else:
            sentence = f"Another plan takes {new:.3g} s instead of {old:.3g} s per step."
    shape = " + ".join(str(len(stage.replicas)) for stage in plan.stages)
    idle = f"; idle: {', '.join(plan.idle[:5])}{' ...' if len(plan.idle) > 5 else ''}" if plan.idle else ""
    sentence += f" Replicas per stage: {shape}; {_value(predicted, objective):.3g} s per step{idle}."
    return Decision(plan, predicted, bound, reason, sentence, spent)


_REASONS = {
    Reason.FIRST: "This is the first plan.",
    Reason.NODE_LOST: "The plan used a node that is gone.",
    Reason.REQUESTED: "The plan did not have the stages asked for, or was for another workload.",
    Reason.INFEASIBLE: "The plan needed a link or memory that is gone.",
    Reason.FASTER: "Another plan is faster.",
}


def _predict(problem: Problem, incumbent: Plan | None, plan: Plan) -> Predicted:
    draft = draft_of(plan, problem.cluster)
    paper: PaperSeconds | None = None
    costs = problem.workload.paper
    if costs is not None and [len(group) for group in draft.groups] == [costs.replicas] * costs.stages:
        paper = paper_seconds(problem, draft.groups)
    moving = 0.0 if incumbent is None else migration_seconds(problem, incumbent, plan)
    return Predicted(estimate(problem, draft), paper, moving)


def _value(predicted: Predicted, objective: Objective) -> float:
    if objective is Objective.PAPER:
        assert predicted.paper is not None
        return predicted.paper.total
    return predicted.iteration_seconds


def _shortfall(problem: Problem, best: Candidate) -> str:
    """What stands in the way of the least infeasible plan that was found."""
    ids, draft = problem.cluster.ids, best.draft
    if best.shortfall_bytes:
        lacking = []
        needs = problem.stage_bytes(draft.cuts).tolist()
        for first, past_last, group, need in zip(draft.cuts, draft.cuts[1:], draft.groups, needs, strict=False):
            lacking += [(need - problem.memory[node], ids[node], first, past_last, need) for node in group]
        lack, node, first, past_last, need = max(lacking)
        return (
            f"no plan fits the memory: in the nearest one found, {node} holds layers [{first}, {past_last}), which take "
            f"{_size(need)} with micro-batches in flight, and lacks {_size(lack)}; add nodes or memory, or shrink the model"
        )
    pairs = [(a, b) for group in draft.groups for a in group for b in group]
    pairs += [pair for chain in draft.chains for pair in itertools.pairwise(chain)]
    pairs += [(b, a) for a, b in pairs]
    a, b = next((a, b) for a, b in pairs if np.isinf(problem.slowness[a, b]))
    return (
        f"no plan has all the links it needs: in the nearest one found, {best.missing_links} are missing, among them "
        f"{ids[a]} -> {ids[b]} (bandwidth 0); make that node reachable or use fewer nodes"
    )


def _size(number: float) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"

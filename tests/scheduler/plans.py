"""Plans for tests: arbitrary plans, sensible or not, and the scheduler's plans for given groups."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.assemble.evaluate import Evaluator, lacking_bytes
from dtfm.scheduler.bound.branch_and_bound import is_small, promising
from dtfm.scheduler.bound.stage_bounds import work_bound
from dtfm.scheduler.model.chains import places
from dtfm.scheduler.model.keeping import ENOUGH
from dtfm.scheduler.model.problem import Draft, Groups, Ints, Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.model.sketch import empty_sketch, gather_members, position_of
from dtfm.scheduler.model.tables import tables
from tests.scheduler.yardstick_keeping import shortfall


def iteration_bound(problem: Problem) -> float:
    """A time that no plan can beat. For many nodes it follows from their devices alone. For few it follows from all plans that
    may take less than a time, which grows until there is one."""
    bound = tried = work_bound(problem)
    shape = Shape(most_stages=min(len(problem.flops), len(problem.activation)))
    while is_small(problem) and tried < 1e4 * bound:
        tried *= 1.1
        least = promising(problem, shape, True, tried, 5_000, over=lambda: False).least
        if least < tried:
            return max(bound, least)
    return bound


def random_draft(rng: np.random.Generator, problem: Problem) -> Draft:
    """A plan that no search would make: nodes dealt at random, some left idle, loads and routes at random."""
    count, layers = len(problem.flops), len(problem.activation)
    stages = int(rng.integers(1, min(count, layers) + 1))
    order = rng.permutation(count)[: int(rng.integers(stages, count + 1))]
    place = np.concatenate([np.arange(stages), rng.integers(0, stages, len(order) - stages)])
    groups = tuple(tuple(sorted(order[place == stage].tolist())) for stage in range(stages))
    cuts = (0, *sorted(rng.choice(np.arange(1, layers), stages - 1, replace=False).tolist()), layers)
    return randomly_loaded(rng, problem, groups, cuts)


def randomly_loaded(rng: np.random.Generator, problem: Problem, groups: Groups, cuts: tuple[int, ...]) -> Draft:
    """The groups with every micro-batch on a route of its own choice. In each stage some replicas get more than others."""
    micro_batches = problem.workload.micro_batches
    columns = []
    for group in groups:
        taste = rng.dirichlet(np.full(len(group), rng.choice([0.3, 1.0, 10.0])))
        weight = taste if rng.random() < 0.5 else problem.flops[list(group)] / problem.flops[list(group)].sum()
        columns.append(rng.choice(group, micro_batches, p=weight))
    loads, flows = [], []
    for group, column in zip(groups, columns, strict=True):
        loads.append(np.array([np.count_nonzero(column == node) for node in group], dtype=np.int64))
    for senders, receivers, a, b in zip(groups, groups[1:], columns, columns[1:], strict=False):
        flows.append(np.array([[np.count_nonzero((a == u) & (b == v)) for v in receivers] for u in senders], np.int64))
    return Draft.of(groups, cuts, tuple(loads), tuple(flows))


def chains_of(draft: Draft) -> Ints:
    """By micro-batch, the nodes that compute it: int64 [micro-batches, stages]."""
    at = places(draft.loads[0], draft.flows)
    return np.column_stack([np.array(group)[column] for group, column in zip(draft.groups, at.T, strict=True)])


def assembled(problem: Problem, groups: Groups, cuts: tuple[int, ...]) -> Draft:
    """The plan of these groups and cuts, with the loads and flows that the scheduler gives them; idle hands stay."""
    candidate = Evaluator(problem, keep_idle_hands=True).estimated(groups, cuts)
    assert candidate.feasible
    return candidate.draft


def memory_shortfall(problem: Problem, groups: Groups, cuts: tuple[int, ...]) -> float:
    """Bytes that the node with the least room lacks; 0 when every stage fits on each of its nodes (rounding errors aside)."""
    position, sketch = position_of(groups, cuts, len(problem.flops)), empty_sketch(tables(problem))
    gather_members(position, sketch)
    lacking = lacking_bytes(tables(problem), sketch, len(groups), position.cuts)
    return lacking if lacking >= ENOUGH else 0.0


def fits(problem: Problem, draft: Draft) -> bool:
    """Whether every stage fits into the memory of each of its replicas."""
    return shortfall(problem, draft) == 0.0

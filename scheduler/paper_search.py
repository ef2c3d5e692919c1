"""The paper's search problem: equal groups and their order, at the least data-parallel plus pipeline cost.

An evolutionary search whose local search is simulated annealing over swaps with the stages in a fixed order (a swap touches
two groups, hence two group costs and at most four matchings); the exact order is taken between rounds. Nodes with equal links are
interchangeable: costs are remembered per multiset of node classes, so that on networks made of regions almost every
evaluation is a look-up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

import numpy as np
from scipy.optimize import linear_sum_assignment

from dtfm.scheduler.matching import bottleneck_matching
from dtfm.scheduler.order import best_order
from dtfm.scheduler.paper import activation_exchange, gradient_exchange
from dtfm.scheduler.problem import Floats, Groups, Problem

POPULATION = 8
ROUND = 6_000
"""Swaps tried per annealing."""
CLASSES_UP_TO = 512
"""Nodes beyond which equal ones are not looked for (cubic work)."""

Key = tuple[int, ...]
"""A group as the sorted classes of its members: equal keys, equal costs."""
Keys = tuple[Key, ...]


@dataclass(slots=True)
class PaperEvaluator:
    """Group and boundary costs by class, remembered.

    ``gradients`` and ``activations`` are [classes, classes]: seconds between a member of one class and another member of the
    other (or the same) one. ``members[c]`` are the nodes of class c.
    """

    gradients: Floats
    activations: Floats
    members: list[list[int]]
    spent: int = 0
    _groups: dict[Key, float] = field(default_factory=dict)
    _boundaries: dict[tuple[Key, Key], float] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem) -> PaperEvaluator:
        costs = problem.workload.paper
        assert costs is not None
        gradients, activations = gradient_exchange(problem, costs), activation_exchange(problem, costs)
        finite = np.concatenate([matrix[np.isfinite(matrix)] for matrix in (gradients, activations)])
        # A link that does not exist costs more than any plan without one.
        far = 1e3 * len(gradients) * (1.0 + float(finite.max()))
        gradients, activations = np.minimum(gradients, far), np.minimum(activations, far)
        members = interchangeable(gradients, activations)
        first = [nodes[0] for nodes in members]
        other = [nodes[-1] for nodes in members]
        return cls(gradients[np.ix_(first, other)], activations[np.ix_(first, other)], members)

    def group(self, key: Key) -> float:
        cost = self._groups.get(key)
        if cost is None:
            block = self.gradients[np.ix_(key, key)]
            cost = self._groups[key] = float((block.sum(axis=1) - block.diagonal()).max())
        return cost

    def boundary(self, a: Key, b: Key) -> float:
        pair = (a, b) if a <= b else (b, a)
        cost = self._boundaries.get(pair)
        if cost is None:
            cost = self._boundaries[pair] = bottleneck_matching(self.activations[np.ix_(*pair)])[0]
        return cost

    def total(self, keys: Keys) -> float:
        groups = max(self.group(key) for key in keys)
        return groups + sum(self.boundary(a, b) for a, b in itertools.pairwise(keys))

    def reordered(self, keys: Keys) -> Keys:
        cost = np.array([[self.boundary(a, b) for b in keys] for a in keys])
        return tuple(keys[stage] for stage in best_order(cost)[1])


def interchangeable(*matrices: Floats) -> list[list[int]]:
    """Nodes in classes: exchanging two of one class leaves every (symmetric) matrix as it is."""
    count = len(matrices[0])
    classes: list[list[int]] = []
    for node in range(count):
        for others in classes if count <= CLASSES_UP_TO else ():
            keep = np.ones(count, dtype=bool)
            keep[[node, others[0]]] = False
            if all((matrix[node, keep] == matrix[others[0], keep]).all() for matrix in matrices):
                others.append(node)
                break
        else:
            classes.append([node])
    return classes


def search_paper(
    problem: Problem,
    seeds: Iterable[Groups],
    rng: Random,
    evaluations: int,
    expired: Callable[[], bool],
) -> tuple[Groups, int]:
    """The best groups found, in pipeline order, and the evaluations spent."""
    evaluator = PaperEvaluator.of(problem)
    costs = problem.workload.paper
    assert costs is not None
    class_of = {node: index for index, nodes in enumerate(evaluator.members) for node in nodes}
    population = []
    for groups in seeds:
        keys = evaluator.reordered(tuple(tuple(sorted(class_of[node] for node in group)) for group in groups))
        population.append((evaluator.total(keys), keys))
    population = sorted(set(population))[:POPULATION]
    everyone = sorted(class_of.values())
    heat = 0.05
    while evaluator.spent < evaluations and not expired():
        mother, father = rng.choice(population)[1], rng.choice(population)[1]
        child = aligned_crossover(mother, father, everyone, rng)
        child = anneal(evaluator, child, everyone, rng, heat * rng.random(), min(ROUND, evaluations - evaluator.spent))
        child = evaluator.reordered(child)
        population = sorted({*population, (evaluator.total(child), child)})[:POPULATION]
    return _nodes(evaluator, population[0][1]), evaluator.spent


def anneal(evaluator: PaperEvaluator, keys: Keys, everyone: list[int], rng: Random, heat: float, swaps: int) -> Keys:
    """The best state met on a cooling walk of swaps and reversals that starts at ``heat`` x the current cost."""
    idle = list(everyone)
    for key in keys:
        for member in key:
            idle.remove(member)
    stages = len(keys)
    pools = [list(key) for key in keys] + ([idle] if idle else [])
    if len(pools) < 2:
        return keys
    state = list(keys)
    group, boundary = evaluator.group, evaluator.boundary
    group_costs = [group(key) for key in state]
    edges = [boundary(a, b) for a, b in itertools.pairwise(state)]
    total = max(group_costs) + sum(edges)
    best, best_keys = total, keys
    temperature = max(heat * total, 1e-9)
    cooling = (1e-4) ** (1 / max(swaps, 1))
    random = rng.random
    for _ in range(swaps):
        evaluator.spent += 1
        temperature *= cooling
        if stages > 2 and random() < 0.1:
            first = int(random() * stages)
            past = first + 2 + int(random() * (stages - first - 1))
            if past > stages or past - first == stages:
                continue
            new_edges = edges[:]
            if first > 0:
                new_edges[first - 1] = boundary(state[first - 1], state[past - 1])
            if past < stages:
                new_edges[past - 1] = boundary(state[first], state[past])
            new_edges[first : past - 1] = edges[first : past - 1][::-1]
            new_total = max(group_costs) + sum(new_edges)
            if new_total <= total or random() < math.exp((total - new_total) / temperature):
                state[first:past] = state[first:past][::-1]
                pools[first:past] = pools[first:past][::-1]
                group_costs[first:past] = group_costs[first:past][::-1]
                edges, total = new_edges, new_total
        else:
            a, b = int(random() * len(pools)), int(random() * len(pools))
            i, j = int(random() * len(pools[a])), int(random() * len(pools[b]))
            if a == b or pools[a][i] == pools[b][j]:
                continue
            pools[a][i], pools[b][j] = pools[b][j], pools[a][i]
            new_edges, new_groups = edges[:], group_costs[:]
            old = {}
            for stage in (a, b):
                if stage < stages:
                    old[stage] = state[stage]
                    state[stage] = tuple(sorted(pools[stage]))
                    new_groups[stage] = group(state[stage])
            new_total = max(new_groups)
            for stage in old:
                if stage:
                    new_edges[stage - 1] = boundary(state[stage - 1], state[stage])
                if stage + 1 < stages:
                    new_edges[stage] = boundary(state[stage], state[stage + 1])
            new_total += sum(new_edges)
            if new_total <= total or random() < math.exp((total - new_total) / temperature):
                group_costs, edges, total = new_groups, new_edges, new_total
            else:
                pools[a][i], pools[b][j] = pools[b][j], pools[a][i]
                for stage, key in old.items():
                    state[stage] = key
        if total < best - 1e-12:
            best, best_keys = total, tuple(state)
    return best_keys


def aligned_crossover(mother: Keys, father: Keys, everyone: list[int], rng: Random) -> Keys:
    """Some groups of the father in place of the mother's that they share most with; the rest is repaired at random."""
    if mother == father:
        return mother
    overlap = np.array([[sum(min(a.count(c), b.count(c)) for c in set(a)) for b in father] for a in mother])
    _, partner = linear_sum_assignment(-overlap)
    left = list(everyone)
    child: list[list[int]] = []
    wanted = [father[partner[stage]] if rng.random() < 0.5 else key for stage, key in enumerate(mother)]
    for key in wanted:
        group = []
        for member in key:
            if member in left:
                left.remove(member)
                group.append(member)
        child.append(group)
    rng.shuffle(left)
    for group, key in zip(child, mother, strict=True):
        while len(group) < len(key):
            group.append(left.pop())
    return tuple(tuple(sorted(group)) for group in child)


def _nodes(evaluator: PaperEvaluator, keys: Keys) -> Groups:
    """Nodes in place of classes: each class's in ascending order."""
    waiting = [list(reversed(nodes)) for nodes in evaluator.members]
    return tuple(tuple(sorted(waiting[member].pop() for member in key)) for key in keys)

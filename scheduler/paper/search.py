"""A search for the paper's problem: equal groups and their order, at the least data-parallel plus pipeline cost.

An evolutionary search whose local search is simulated annealing over swaps, with the stages in a fixed order: a swap
changes two groups, hence two group costs and at most four matchings. The exact order is computed between rounds.
Nodes with equal links are interchangeable, so costs are cached by the classes of a group's nodes; on networks made of
regions almost every evaluation is a lookup.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

import numpy as np
from scipy.optimize import linear_sum_assignment

from dtfm.scheduler.assemble.evaluate import Improved
from dtfm.scheduler.assemble.matching import bottleneck_cost
from dtfm.scheduler.assemble.stage_order import best_order
from dtfm.scheduler.model.problem import Floats, Groups, Problem
from dtfm.scheduler.paper.cost import activation_exchange, gradient_exchange

POPULATION = 8
"""Largest number of candidates that are kept."""
ROUND = 6_000
"""Largest number of swaps tried per annealing,"""
SWAPS_PER_NODE = 100
"""and by number of nodes: a small cluster gains more from another beginning than from a longer walk."""
CLASSES_UP_TO = 512
"""Largest number of nodes among which interchangeable ones are looked for, which takes cubic time."""

Key = tuple[int, ...]
"""A group as the sorted classes of its members: equal keys have equal costs."""
Keys = tuple[Key, ...]


@dataclass(slots=True)
class PaperEvaluator:
    """Costs of groups and boundaries by class, cached.

    ``gradients`` and ``activations`` are [classes, classes]: seconds between a member of one class and another member
    of the other, or of the same, class. ``members[c]`` are the nodes of class c.
    """

    gradients: Floats
    activations: Floats
    members: list[list[int]]
    improved: Improved = lambda evaluations, cost: None
    spent: int = 0
    best: float = math.inf
    _groups: dict[Key, float] = field(default_factory=dict)
    _boundaries: dict[tuple[Key, Key], tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem, improved: Improved = lambda evaluations, cost: None) -> PaperEvaluator:
        costs = problem.workload.paper
        assert costs is not None
        gradients, activations = gradient_exchange(problem, costs), activation_exchange(problem, costs)
        finite = np.concatenate([matrix[np.isfinite(matrix)] for matrix in (gradients, activations)])
        # A missing link costs more than any plan without missing links.
        far = 1e3 * len(gradients) * (1.0 + float(finite.max()))
        gradients, activations = np.minimum(gradients, far), np.minimum(activations, far)
        members = interchangeable(gradients, activations)
        first = [nodes[0] for nodes in members]
        other = [nodes[-1] for nodes in members]
        return cls(gradients[np.ix_(first, other)], activations[np.ix_(first, other)], members, improved)

    def group(self, key: Key) -> float:
        cost = self._groups.get(key)
        if cost is None:
            block = self.gradients[np.ix_(key, key)]
            cost = self._groups[key] = float((block.sum(axis=1) - block.diagonal()).max())
        return cost

    def boundary(self, a: Key, b: Key) -> tuple[float, float]:
        """The cost of the boundary, and the mean over the pairs of a matching with the least sum.

        The mean is smoother: it shows progress among the pairs better than the worst.
        """
        pair = (a, b) if a <= b else (b, a)
        cost = self._boundaries.get(pair)
        if cost is None:
            block = self.activations[np.ix_(*pair)]
            rows, columns = linear_sum_assignment(block)
            cost = bottleneck_cost(block), float(block[rows, columns].mean())
            self._boundaries[pair] = cost
        return cost

    def total(self, keys: Keys) -> float:
        groups = max(self.group(key) for key in keys)
        return groups + sum(self.boundary(a, b)[0] for a, b in itertools.pairwise(keys))

    def found(self, cost: float) -> None:
        """Calls ``improved`` when no cost so far was as low."""
        if cost < self.best - 1e-12:
            self.best = cost
            self.improved(self.spent, cost)

    def reordered(self, keys: Keys) -> Keys:
        cost = np.array([[self.boundary(a, b)[0] for b in keys] for a in keys])
        return tuple(keys[stage] for stage in best_order(cost))


def interchangeable(*matrices: Floats) -> list[list[int]]:
    """The nodes in classes: exchanging two nodes of a class changes none of the (symmetric) matrices."""
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
    bound: float = 0.0,
    improved: Improved = lambda evaluations, cost: None,
) -> tuple[Groups, int]:
    """The best groups found, in pipeline order, and the number of evaluations. Ends early when the cost reaches ``bound``."""
    evaluator = PaperEvaluator.of(problem, improved)
    costs = problem.workload.paper
    assert costs is not None
    class_of = {node: index for index, nodes in enumerate(evaluator.members) for node in nodes}
    population = []
    for groups in seeds:
        keys = evaluator.reordered(tuple(tuple(sorted(class_of[node] for node in group)) for group in groups))
        population.append((evaluator.total(keys), keys))
        evaluator.found(population[-1][0])
    population = sorted(set(population))[:POPULATION]
    everyone = sorted(class_of.values())
    enough = bound * (1 + 1e-9)
    while population[0][0] > enough and evaluator.spent < evaluations and not expired():
        mother, father = rng.choice(population)[1], rng.choice(population)[1]
        child, idle = aligned_crossover(mother, father, everyone, rng)
        swaps = min(ROUND, SWAPS_PER_NODE * len(everyone), evaluations - evaluator.spent)
        heat, smoothing = 0.03 * rng.random(), rng.choice((0.0, 0.1, 0.5, 2.0))
        child = evaluator.reordered(anneal(evaluator, child, idle, rng, heat, smoothing, swaps))
        cost = evaluator.total(child)
        evaluator.found(cost)
        population = sorted({*population, (cost, child)})[:POPULATION]
    return _nodes(evaluator, population[0][1]), evaluator.spent


def anneal(
    evaluator: PaperEvaluator, start: Keys, idle: list[int], rng: Random, heat: float, smoothing: float, swaps: int
) -> Keys:
    """The cheapest state met on a cooling walk of ``swaps`` steps.

    Each step swaps two nodes (idle ones included) or reverses part of the order. ``heat`` is the first temperature as a fraction
    of the cost. ``smoothing`` is the weight of the mean costs beside the worst: the worst alone does not change while many pairs
    must improve together.
    """
    keys = [*start, tuple(idle)] if idle else list(start)
    stages = len(start)
    if len(keys) < 2:
        return start
    groups = [evaluator.group(key) for key in start]
    edges = [evaluator.boundary(a, b) for a, b in itertools.pairwise(start)]
    cost, energy = _sums(groups, edges, smoothing)
    best, best_keys = cost, start
    temperature = max(heat * cost, 1e-9)
    decay = 1e-4 ** (1 / swaps)
    random = rng.random
    for _ in range(swaps):
        evaluator.spent += 1
        temperature *= decay
        changed, changed_groups, changed_edges = keys[:], groups[:], edges[:]
        if random() < 0.1:
            first, past = sorted((int(random() * (stages + 1)), int(random() * (stages + 1))))
            changed[first:past] = changed[first:past][::-1]
            changed_groups[first:past] = changed_groups[first:past][::-1]
            inside = slice(first, max(first, past - 1))
            changed_edges[inside] = changed_edges[inside][::-1]
            stale = {first - 1, past - 1}
        else:
            a, b = int(random() * len(keys)), int(random() * len(keys))
            i, j = int(random() * len(keys[a])), int(random() * len(keys[b]))
            mine, other = keys[a][i], keys[b][j]
            if a == b or mine == other:
                continue
            changed[a] = tuple(sorted((*keys[a][:i], *keys[a][i + 1 :], other)))
            changed[b] = tuple(sorted((*keys[b][:j], *keys[b][j + 1 :], mine)))
            for stage in (a, b):
                if stage < stages:
                    changed_groups[stage] = evaluator.group(changed[stage])
            stale = {a - 1, a, b - 1, b}
        for edge in stale:
            if 0 <= edge < stages - 1:
                changed_edges[edge] = evaluator.boundary(changed[edge], changed[edge + 1])
        new_cost, new_energy = _sums(changed_groups, changed_edges, smoothing)
        if new_energy <= energy or random() < math.exp((energy - new_energy) / temperature):
            keys, groups, edges, energy = changed, changed_groups, changed_edges, new_energy
            if new_cost < best - 1e-12:
                best, best_keys = new_cost, tuple(keys[:stages])
                evaluator.found(new_cost)
    return best_keys


def _sums(groups: list[float], edges: list[tuple[float, float]], smoothing: float) -> tuple[float, float]:
    """The cost, and the smoothed energy that guides the walk."""
    cost = max(groups)
    means = sum(groups) / len(groups)
    for bottleneck, mean in edges:
        cost += bottleneck
        means += math.sqrt(mean * bottleneck)
    return cost, cost + smoothing * means


def aligned_crossover(mother: Keys, father: Keys, everyone: list[int], rng: Random) -> tuple[Keys, list[int]]:
    """The mother with some groups replaced by the father's groups that share most with them, and the nodes left idle.

    A node that two of the chosen groups claim stays in the first. Gaps are filled at random.
    """
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
    return tuple(tuple(sorted(group)) for group in child), sorted(left)


def _nodes(evaluator: PaperEvaluator, keys: Keys) -> Groups:
    """Nodes in place of classes, those of each class in ascending order."""
    waiting = [list(reversed(nodes)) for nodes in evaluator.members]
    return tuple(tuple(sorted(waiting[member].pop() for member in key)) for key in keys)

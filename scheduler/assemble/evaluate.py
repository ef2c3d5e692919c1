"""From groups to whole plans with their costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from dtfm.scheduler.assemble.cuts import best_cuts
from dtfm.scheduler.assemble.flows import connected
from dtfm.scheduler.cost.estimate import estimate
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.problem import Draft, Groups, Problem

Improved = Callable[[int, float], None]
"""Called for each plan that is better than all before, with the evaluations so far and its seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A draft with its price.

    ``shortfall_bytes`` is the memory that some device lacks, ``missing_links`` the number of links that the draft
    needs and that do not exist. ``seconds`` is finite only where both are 0.
    """

    draft: Draft
    shortfall_bytes: float
    missing_links: int
    seconds: float
    surcharge: float = 0.0
    """Cost of state transfer, in seconds per step until the next change of plan."""

    @property
    def price(self) -> tuple[float, int, float]:
        """A key for comparison: smaller is better. Feasible candidates come first, then those nearest to feasible."""
        return self.shortfall_bytes, self.missing_links, self.seconds + self.surcharge

    @property
    def feasible(self) -> bool:
        return bool(np.isfinite(self.seconds))


@dataclass(slots=True)
class Evaluator:
    """Prices groups, each only once, and counts the evaluations."""

    problem: Problem
    keep_idle_hands: bool
    """Whether a replica without micro-batches stays in its stage (its place was requested) or becomes idle."""
    surcharge: Callable[[Groups, tuple[int, ...]], float] = lambda groups, cuts: 0.0
    improved: Improved = lambda evaluations, seconds: None
    spent: int = 0
    best: float = math.inf
    """Least simulated price so far, the surcharge included."""
    _estimated: dict[tuple[Groups, tuple[int, ...] | None], Candidate] = field(default_factory=dict)
    _simulated: dict[tuple[Groups, tuple[int, ...] | None], Candidate] = field(default_factory=dict)

    def estimated(self, groups: Groups, cuts: tuple[int, ...] | None = None) -> Candidate:
        """The candidate at its estimated price. With ``cuts`` None, best_cuts cuts the model."""
        groups = tuple(tuple(sorted(group)) for group in groups)
        key = (groups, cuts)
        if key not in self._estimated:
            self.spent += 1
            self._estimated[key] = self._estimate(groups, cuts)
        return self._estimated[key]

    def simulated(self, groups: Groups, cuts: tuple[int, ...] | None = None) -> Candidate:
        """The same plan at its simulated price."""
        rough = self.estimated(groups, cuts)
        if not rough.feasible:
            return rough
        key = (rough.draft.groups, rough.draft.cuts)
        if key not in self._simulated:
            self.spent += 1
            seconds = simulate(self.problem, rough.draft)
            candidate = self._simulated[key] = replace(rough, seconds=seconds)
            if candidate.price[-1] < self.best:
                self.best = candidate.price[-1]
                self.improved(self.spent, self.best)
        return self._simulated[key]

    def _estimate(self, groups: Groups, cuts: tuple[int, ...] | None) -> Candidate:
        if cuts is None:
            cuts, shortfall = best_cuts(self.problem, groups)
        else:
            shortfall = memory_shortfall(self.problem, groups, cuts)
        draft = connected(self.problem, groups, cuts)
        if not self.keep_idle_hands:
            working = tuple(
                tuple(node for node, load in zip(group, loads.tolist(), strict=True) if load)
                for group, loads in zip(groups, draft.loads, strict=True)
            )
            if working != groups:
                return self.estimated(working)
        missing = missing_links(self.problem, draft)
        seconds = float("inf") if shortfall or missing else estimate(self.problem, draft)
        return Candidate(draft, shortfall, missing, seconds, self.surcharge(groups, cuts))


def memory_shortfall(problem: Problem, groups: Groups, cuts: tuple[int, ...]) -> float:
    """Bytes that the node with the least room lacks; 0 when every stage fits on each of its nodes (rounding errors aside)."""
    rooms = np.array([problem.memory[list(group)].min() for group in groups])
    lacking = float((problem.stage_bytes(cuts) - rooms).max())
    return lacking if lacking >= 1.0 else 0.0


def missing_links(problem: Problem, draft: Draft) -> int:
    """The number of directed links that the draft needs and that do not exist."""
    unreachable = np.isinf(problem.slowness)
    count = sum(int(unreachable[np.ix_(group, group)].sum()) for group in draft.groups)
    for senders, receivers, flows in zip(draft.groups, draft.groups[1:], draft.flows, strict=False):
        used = flows > 0
        there, back = unreachable[np.ix_(senders, receivers)], unreachable[np.ix_(receivers, senders)].T
        count += int(there[used].sum()) + int(back[used].sum())
    return count

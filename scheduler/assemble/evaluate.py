"""From a position to a whole plan with its price."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from dtfm.scheduler.assemble.cuts import cut_model, nearly_fitting_cuts
from dtfm.scheduler.assemble.flows import connect
from dtfm.scheduler.cost.estimate import estimated_seconds
from dtfm.scheduler.cost.load import share_out
from dtfm.scheduler.cost.pace import rough_seconds
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.keeping import ENOUGH, first_need, lacking as in_way, least_lacking
from dtfm.scheduler.model.problem import Draft, Groups, Ints, Problem
from dtfm.scheduler.model.sketch import (
    NO_LINK,
    NO_ROOM,
    NOT_PROVEN,
    Position,
    Sketch,
    draft_of_sketch,
    drop_idle,
    empty_sketch,
    gather_members,
    not_proven,
    position_of,
)
from dtfm.scheduler.model.sums import add_up
from dtfm.scheduler.model.tables import Tables, tables

Improved = Callable[[int, float], None]
"""Called for each plan that is better than all before, with the evaluations so far and its seconds."""


@entry()
def price_of(t: Tables, position: Position, sketch: Sketch, keep_idle: bool) -> float:
    """The estimated seconds per step of a position; NO_LINK, NOT_PROVEN or NO_ROOM and more when it does not work. Fills in the
    sketch.

    With ``keep_idle`` a node without micro-batches stays in its stage. Otherwise the plan is as if it were idle: its links do not
    count when the others' loads are set.
    """
    stages, cuts = position.stages[0], position.cuts
    if not gather_members(position, sketch):
        return np.inf
    lacking = lacking_bytes(t, sketch, stages, cuts)
    if lacking >= ENOUGH:
        return NO_ROOM + lacking
    bare = not_proven(t, sketch, stages)
    if bare > 0:
        return NOT_PROVEN + bare
    add_up(t, sketch.sums, position.place, stages)
    return price_of_members(t, sketch, stages, cuts, keep_idle)


@compiled()
def price_of_members(t: Tables, sketch: Sketch, stages: int, cuts: Ints, keep_idle: bool) -> float:
    """The same, given the members and the sums, for a position that fits. Nodes without micro-batches are taken out of both."""
    missing = 0
    for stage in range(stages):
        if sketch.sums.slowest[sketch.sums.row[stage]].slowness < np.inf:
            continue
        for a in sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]:
            for b in sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]:
                if np.isinf(t.link[a, b].slowness):
                    missing += 1
    if t.tied and stages > 1:
        for a in sketch.members[sketch.stage[0].first : sketch.stage[1].first]:
            for b in sketch.members[sketch.stage[stages - 1].first : sketch.stage[stages].first]:
                if np.isinf(t.link[a, b].slowness) or np.isinf(t.link[b, a].slowness):
                    missing += 1
    if missing:
        return NO_LINK + missing
    while True:
        if np.isinf(rough_seconds(t, sketch, stages, cuts, np.inf, 0.0)):
            return NO_LINK + 1
        longest = share_out(t, sketch, stages)
        if not connect(t, sketch, stages, cuts, longest):
            return NO_LINK + 1
        if keep_idle or not drop_idle(t, sketch, stages):
            break
    return estimated_seconds(t, sketch, stages, cuts)


@entry()
def lacking_bytes(t: Tables, sketch: Sketch, stages: int, cuts: Ints) -> float:
    """The bytes of memory that the worst node lacks, which is then what decides; 0 when all stages fit."""
    lacking = 0.0
    for stage in range(stages):
        held = float(min(t.least_held[stages, stage], t.micro_batches))
        cheapest = first_need(t, cuts[stage], cuts[stage + 1])
        for node in sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]:
            own = in_way(cheapest, held, t.node[node].memory, t.node[node].host_memory)
            if own >= ENOUGH:
                own = least_lacking(t, cheapest, cuts[stage], cuts[stage + 1], held, node)
            if own > lacking:
                lacking = own
                sketch.decides[0], sketch.decides[1], sketch.decides[2] = node, -1, stage
                sketch.decides[3], sketch.decides[4], sketch.decides[5] = node, -1, stage
    return lacking


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A draft with its price."""

    draft: Draft
    shortfall_bytes: float
    """The memory that some device lacks."""
    missing_links: int
    """The number of links that the draft needs and that do not exist."""
    seconds: float
    """Seconds per step. Finite only if ``shortfall_bytes``, ``missing_links`` and ``not_proven`` are 0."""
    surcharge: float = 0.0
    """Cost of state transfer, in seconds per step until the next change of plan."""
    not_proven: int = 0
    """The number of stages that need a proven node and have none."""

    @property
    def price(self) -> tuple[float, int, int, float]:
        """A key for comparison: smaller is better. Feasible candidates come first, then those nearest to feasible."""
        return self.shortfall_bytes, self.not_proven, self.missing_links, self.seconds + self.surcharge

    @property
    def feasible(self) -> bool:
        return bool(np.isfinite(self.seconds))


@dataclass(slots=True)
class Evaluator:
    """Prices groups and cuts, each only once, and counts the evaluations."""

    by_paper: ClassVar[bool] = False
    """Whether prices follow the paper's cost model: True for equal_groups.PaperEvaluator."""
    problem: Problem
    keep_idle_hands: bool
    """Whether a replica without micro-batches stays in its stage (its place was requested) or becomes idle."""
    surcharge: Callable[[Groups, tuple[int, ...]], float] = lambda groups, cuts: 0.0
    improved: Improved = lambda evaluations, seconds: None
    spent: int = 0
    told: float = math.inf
    """Least price so far that ``improved`` was told."""
    best: float = math.inf
    """Least simulated price so far, the surcharge included."""
    tables: Tables = field(init=False)
    _sketch: Sketch = field(init=False)
    _estimated: dict[tuple[Groups, tuple[int, ...] | None], Candidate] = field(default_factory=dict)
    _simulated: dict[tuple[Groups, tuple[int, ...]], Candidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tables = tables(self.problem)
        self._sketch = empty_sketch(self.tables)

    def met(self, steps: int, seconds: float) -> None:
        """Tells ``improved`` about a better plan. ``steps`` are the steps of walks that are not counted yet."""
        if seconds < min(self.told, NO_LINK):
            self.told = seconds
            self.improved(self.spent + steps, seconds)

    def estimated(self, groups: Groups, cuts: tuple[int, ...] | None = None) -> Candidate:
        """The candidate at its estimated price. With ``cuts`` None, cuts.cut_model cuts the model."""
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
            self.best = min(self.best, candidate.price[-1])
            self.met(0, self.best)
        return self._simulated[key]

    def _estimate(self, groups: Groups, cuts: tuple[int, ...] | None) -> Candidate:
        sketch = self._sketch
        if cuts is None:
            position = position_of(groups, (), len(self.problem.flops))
            gather_members(position, sketch)
            add_up(self.tables, sketch.sums, position.place, len(groups))
            if not cut_model(self.tables, sketch, len(groups), position.cuts):
                nearly_fitting_cuts(self.tables, sketch, len(groups), position.cuts)
            cuts = tuple(position.cuts[: len(groups) + 1].tolist())
        position = position_of(groups, cuts, len(self.problem.flops))
        price = price_of(self.tables, position, sketch, self.keep_idle_hands)
        if price < NO_LINK:
            draft = draft_of_sketch(sketch, len(groups), position.cuts)
            return Candidate(draft, 0.0, 0, price, self.surcharge(draft.groups, cuts))
        nothing = Draft.of(groups, cuts)
        if price >= NO_ROOM:
            return Candidate(nothing, price - NO_ROOM, 0, math.inf)
        if price >= NOT_PROVEN:
            return Candidate(nothing, 0.0, 0, math.inf, not_proven=int(price - NOT_PROVEN))
        return Candidate(nothing, 0.0, int(price - NO_LINK), math.inf)


def missing_links(problem: Problem, draft: Draft) -> int:
    """The number of directed links that the draft needs and that do not exist."""
    unreachable = np.isinf(problem.slowness)
    count = sum(int(unreachable[np.ix_(group, group)].sum()) for group in draft.groups)
    for senders, receivers, flows in zip(draft.groups, draft.groups[1:], draft.flows, strict=False):
        used = flows > 0
        there, back = unreachable[np.ix_(senders, receivers)], unreachable[np.ix_(receivers, senders)].T
        count += int(there[used].sum()) + int(back[used].sum())
    if problem.workload.tied and len(draft.groups) > 1:
        first, last = draft.groups[0], draft.groups[-1]
        count += int(unreachable[np.ix_(first, last)].sum()) + int(unreachable[np.ix_(last, first)].sum())
    return count


def bare_stages(problem: Problem, groups: Groups) -> tuple[int, ...]:
    """The stages that need a proven node and have none."""
    if not problem.is_mixed:
        return ()
    return tuple(stage for stage, group in enumerate(groups) if not problem.proven[list(group)].any())

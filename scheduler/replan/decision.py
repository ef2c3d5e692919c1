"""Decides between the layout in force and a layout that the search found: what the change costs, and whether it is worth it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from dtfm.scheduler.assemble.evaluate import Evaluator, bare_stages, missing_links
from dtfm.scheduler.bound.stage_bounds import work_bound
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.decision import Decision, Predicted, Reason
from dtfm.scheduler.model.keeping import has_room, keepings
from dtfm.scheduler.model.plan import Plan, validate
from dtfm.scheduler.model.problem import Problem, draft_of
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.model.rounds import NO_ROUNDS
from dtfm.scheduler.replan import sentences
from dtfm.scheduler.replan.price import Price, Terms, price_of_layout, problem_of_island
from dtfm.scheduler.replan.switch import MARGIN, Before
from dtfm.scheduler.replan.warm_start import survivors


@dataclass(frozen=True, slots=True)
class Standing:
    """The layout in force. ``obstacle`` is the reason why it cannot stay, or None."""

    before: Before
    obstacle: Reason | None

    @property
    def layout(self) -> Plan:
        return self.before.layout

    @classmethod
    def of(
        cls,
        problem: Problem,
        layout: Plan,
        shape: Shape | None = None,
        held: Plan | None = None,
        *,
        with_moments: bool = False,
    ) -> Standing:
        """``shape`` is the shape that each of the layout's islands must have; None: any. ``held`` and ``with_moments``: see
        Before."""
        return cls(Before.of(problem, layout, held, with_moments=with_moments), _obstacle(problem, layout, shape))

    def seconds_per_step(self, problem: Problem) -> float:
        """Seconds per step of a plan without islands. If the plan cannot stay, roughly the seconds of its surviving nodes."""
        if self.obstacle in (None, Reason.NOT_PROVEN):
            return simulate(problem, draft_of(self.layout, problem.cluster))
        left = tuple(group for group in survivors(self.layout, problem) if group)
        usable = left and len(left) <= len(problem.activation)
        repaired = Evaluator(problem, keep_idle_hands=True).estimated(left) if usable else None
        bound = work_bound(problem)
        return repaired.seconds if repaired is not None and repaired.feasible else bound


def _obstacle(problem: Problem, layout: Plan, shape: Shape | None) -> Reason | None:
    """The reason why the layout cannot stay, or None."""
    ids = set(problem.cluster.ids)
    if not ids.issuperset(layout.nodes):
        return Reason.NODE_LOST
    try:
        validate(replace(layout, idle=_rest(problem, layout)), ids, problem.workload)
    except ValueError:
        return Reason.REQUESTED
    islands = layout.islands
    for island in islands:
        own = problem_of_island(problem, island)
        draft = draft_of(island, own.cluster)
        ways = set(itertools.chain.from_iterable(keepings(own, draft)))
        if (shape is not None and not shape.admits(draft.groups)) or not ways.issubset(problem.workload.ways):
            return Reason.REQUESTED
        if missing_links(own, draft) or not has_room(own, draft):
            return Reason.INFEASIBLE
        # With fewer proven nodes than stages, the first to be proven would force a plan of fewer stages, however slow.
        could_share = np.count_nonzero(own.proven) >= len(draft.groups)
        if len(islands) == 1 and could_share and bare_stages(own, draft.groups):
            return Reason.NOT_PROVEN
    return None


def _rest(problem: Problem, plan: Plan) -> tuple[str, ...]:
    used = set(plan.nodes)
    return tuple(node for node in problem.cluster.ids if node not in used)


def decide(
    problem: Problem,
    standing: Standing | None,
    found: Plan,
    terms: Terms,
    *,
    horizon: float,
    uncertainty: float = 0.0,
    bound: float = 0.0,
    spent: int = 0,
) -> Decision:
    """Keeps the layout in force if it can stay, unless the ``found`` layout gains enough. A layout that cannot stay is always
    replaced.

    The gain is the time saved in the ``horizon``, less the seconds of the change. It must exceed MARGIN and the spread of
    measurements (``uncertainty``, a fraction of a step). It must be twice as much if nodes have to free memory first.

    Nodes without memory for their old stage beside their new one are told to free the old one first (Plan.frees_first).
    ``bound`` is the decision's lower bound, ``spent`` the number of evaluations.
    """
    assert found.micro_batches % problem.workload.micro_batches == 0, "a step has whole batches"
    of_step = replace(problem.workload, micro_batches=found.micro_batches)
    validate(replace(found, rounds=NO_ROUNDS), problem.cluster.ids, of_step)
    price = price_of_layout(problem, found, terms)
    if standing is None:
        return _decision(problem, found, price, 0.0, Reason.FIRST, sentences.FIRST, terms, bound, spent)
    ids = problem.cluster.ids
    switch = standing.before.switch(found)
    what = sentences.changing(switch, problem.cluster)
    found = replace(found, frees_first=tuple(ids[each.node] for each in switch.freeing))
    if standing.obstacle is not None:
        reason, why = standing.obstacle, sentences.OBSTACLES[standing.obstacle]
    else:
        current = price_of_layout(problem, standing.layout, terms)
        gain = 1 - price.compared / current.compared - switch.seconds / horizon
        least = max(MARGIN, uncertainty) * (2 if switch.freeing else 1)
        if gain <= least:
            plan = replace(standing.layout, idle=_rest(problem, standing.layout))
            why = sentences.kept(gain, least, horizon, switch, problem.cluster)
            if len(plan.islands) == 1 and (bare := bare_stages(problem, draft_of(plan, problem.cluster).groups)):
                why = sentences.joined(why, sentences.unproven(len(plan.stages), len(bare)))
            return _decision(problem, plan, current, 0.0, Reason.KEPT, why, terms, bound, spent)
        reason, why = Reason.FASTER, sentences.faster(price, current)
    why = sentences.joined(why, what)
    return _decision(problem, found, price, switch.seconds, reason, why, terms, bound, spent)


def _decision(
    problem: Problem,
    plan: Plan,
    price: Price,
    change_seconds: float,
    reason: Reason,
    why: str,
    terms: Terms,
    bound: float,
    spent: int,
) -> Decision:
    sentence = sentences.joined(why, sentences.idle(plan), sentences.exchanges(problem, plan, price, terms))
    return Decision(plan, Predicted(price.step, change_seconds, price.exchange), bound, reason, sentence, spent)

"""Compares a new plan with the incumbent: what the change costs, and whether it is worth it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from dtfm.scheduler.assemble.evaluate import Evaluator, bare_stages, missing_links
from dtfm.scheduler.assemble.infeasible import size_in_words
from dtfm.scheduler.bound.stage_bounds import work_bound
from dtfm.scheduler.cost.in_flight import depths
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.cost.state_transfer import Holdings
from dtfm.scheduler.model.decision import Decision, Predicted, Reason
from dtfm.scheduler.model.keeping import ENOUGH, has_room, keepings
from dtfm.scheduler.model.memory import Keeping, OptimizerState
from dtfm.scheduler.model.plan import Plan, validate
from dtfm.scheduler.model.problem import Draft, Problem, draft_of
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.replan.warm_start import survivors

MARGIN = 0.03
"""Fraction of its seconds per step by which a plan must beat the incumbent: measurements vary by about this much."""


@dataclass(frozen=True, slots=True)
class Incumbent:
    """The plan in force.

    ``obstacle`` is the reason why it cannot stay, or None. ``holdings`` says which node holds which state.
    """

    plan: Plan
    obstacle: Reason | None
    holdings: Holdings

    @classmethod
    def of(cls, problem: Problem, plan: Plan, shape: Shape) -> Incumbent:
        return cls(plan, _obstacle(problem, plan, shape), Holdings.of(problem, plan))

    def seconds_per_step(self, problem: Problem) -> float:
        """Seconds per step of the plan, or of about what is left of it."""
        if self.obstacle in (None, Reason.NOT_PROVEN):
            return simulate(problem, draft_of(self.plan, problem.cluster))
        left = tuple(group for group in survivors(self.plan, problem) if group)
        usable = left and len(left) <= len(problem.activation)
        repaired = Evaluator(problem, keep_idle_hands=True).estimated(left) if usable else None
        bound = work_bound(problem)
        return repaired.seconds if repaired is not None and repaired.feasible else bound


def _obstacle(problem: Problem, incumbent: Plan, shape: Shape) -> Reason | None:
    """The reason why the incumbent cannot stay, or None."""
    ids = set(problem.cluster.ids)
    if not ids.issuperset(incumbent.nodes):
        return Reason.NODE_LOST
    try:
        validate(replace(incumbent, idle=_rest(problem, incumbent)), ids, problem.workload)
    except ValueError:
        return Reason.REQUESTED
    draft = draft_of(incumbent, problem.cluster)
    ways = set(itertools.chain.from_iterable(keepings(problem, draft)))
    if not shape.admits(draft.groups) or not ways.issubset(problem.workload.ways):
        return Reason.REQUESTED
    if missing_links(problem, draft) or not has_room(problem, draft):
        return Reason.INFEASIBLE
    # With fewer proven nodes than stages, the first to be proven would force a plan of fewer stages, however slow.
    could_share = np.count_nonzero(problem.proven) >= len(draft.groups)
    return Reason.NOT_PROVEN if could_share and bare_stages(problem, draft.groups) else None


def _rest(problem: Problem, plan: Plan) -> tuple[str, ...]:
    used = set(plan.nodes)
    return tuple(node for node in problem.cluster.ids if node not in used)


def decide(
    problem: Problem,
    incumbent: Incumbent | None,
    draft: Draft,
    generation: int,
    bound: float,
    spent: int,
    horizon: float,
    overhead: float = 0.0,
    uncertainty: float = 0.0,
) -> Decision:
    """Keeps the incumbent if it can stay, unless the draft wins back the cost of state transfer within the horizon, and MARGIN or
    the ``uncertainty`` of what was measured, and every node has memory for its old and its new stage together. An incumbent that
    cannot stay is replaced in any case.

    ``bound`` is the decision's lower bound, ``spent`` the number of evaluations, ``overhead`` the seconds of each step that the
    simulation leaves out.
    """
    plan = draft.plan(problem.cluster, depths(problem, draft), keepings(problem, draft), generation)
    validate(plan, problem.cluster.ids, problem.workload)
    if incumbent is None:
        predicted = _predict(problem, draft, 0.0, overhead)
        return Decision(plan, predicted, bound, Reason.FIRST, "No plan was in force." + _idle(plan), spent)
    transfer_seconds = incumbent.holdings.seconds(draft.groups, draft.cuts)
    predicted = _predict(problem, draft, transfer_seconds, overhead)
    fetch, size = incumbent.holdings.fetched(draft.groups, draft.cuts)
    if incumbent.obstacle is not None:
        reason, sentence = incumbent.obstacle, _OBSTACLES[incumbent.obstacle]
    else:
        current = _predict(problem, draft_of(incumbent.plan, problem.cluster), 0.0, overhead)
        old, new = current.iteration_seconds, predicted.iteration_seconds
        gain, least = 1 - new / old - transfer_seconds / horizon, max(MARGIN, uncertainty)
        short = short_of_memory(problem, incumbent.plan, draft) if gain > least else None
        if gain <= least or short is not None:
            plan = replace(incumbent.plan, idle=_rest(problem, incumbent.plan))
            predicted, fetch = current, 0
            reason = Reason.KEPT
            sentence = (
                f"The plan stays: another would gain {max(0.0, gain):.1%} in the {horizon:,.0f} s that it should stand, less "
                f"than the required {least:.0%}."
            )
            if short is not None:
                sentence = (
                    f"The plan stays: another would gain {gain:.1%}, but {short[0]} lacks {size_in_words(short[1])} of memory to "
                    "hold its old stage and its new one while they change."
                )
            if bare := bare_stages(problem, draft_of(plan, problem.cluster).groups):
                sentence += f" Proven nodes are too few for its {len(plan.stages)} stages: {len(bare)} have none."
        else:
            reason = Reason.FASTER
            sentence = f"Another plan takes {new:.3g} s per step instead of {old:.3g} s."
    if fetch:
        sentence += f" {fetch} nodes fetch {size / 1e6:.0f} MB in {transfer_seconds:.3g} s."
    return Decision(plan, predicted, bound, reason, sentence + _idle(plan), spent)


_OBSTACLES = {
    Reason.NODE_LOST: "The plan used a node that has left.",
    Reason.REQUESTED: "The plan did not have the requested stages or ways to keep what nodes need, or was for another workload.",
    Reason.INFEASIBLE: "The plan needed a link or memory that is gone.",
    Reason.NOT_PROVEN: "The plan had stages without a proven node.",
}


def _idle(plan: Plan) -> str:
    named = ", ".join(plan.idle[:5]) + (f" and {len(plan.idle) - 5} more" if len(plan.idle) > 5 else "")
    return f" Idle, because no faster plan uses them: {named}." if plan.idle else ""


def _predict(problem: Problem, draft: Draft, transfer_seconds: float, overhead: float) -> Predicted:
    return Predicted(simulate(problem, draft) + overhead, transfer_seconds)


def short_of_memory(problem: Problem, plan: Plan, draft: Draft) -> tuple[str, float] | None:
    """The node that lacks most to hold its stage of ``plan`` and its new one at the same time, and the bytes; None if all have
    room. Nothing is in flight then. Layers that are in both count once, on the device and in the host's memory, as far as their
    state is there both before and after: what is kept elsewhere from now on is there besides."""
    numbers = {name: number for number, name in enumerate(problem.cluster.ids)}
    old = {
        numbers[name]: (stage.layers, stage.keeping[place] if stage.keeping else Keeping())
        for stage in plan.stages
        for place, name in enumerate(stage.replicas)
        if name in numbers
    }
    lacking = []
    for group, ways, first, past_last in zip(
        draft.groups, keepings(problem, draft), draft.cuts, draft.cuts[1:], strict=False
    ):
        for node, way in zip(group, ways, strict=True):
            if node in old and old[node] != ((first, past_last), way):
                lacking.append((_lacking(problem, node, *old[node], (first, past_last), way), node))
    worst, node = max(lacking, default=(0.0, -1))
    return (problem.cluster.ids[node], worst) if worst >= ENOUGH else None


def _lacking(
    problem: Problem, node: int, old: tuple[int, int], before: Keeping, new: tuple[int, int], after: Keeping
) -> float:
    both = max(0, min(old[1], new[1]) - max(old[0], new[0]))
    shared = (max(old[0], new[0]), max(old[0], new[0]) + both)
    held, added = _state(problem, old, before), _state(problem, new, after)
    known = map(min, _state(problem, shared, before), _state(problem, shared, after))
    device, host = (one + other - same for one, other, same in zip(held, added, known, strict=True))
    own = float(problem.host_memory[node])
    if own == 0.0:
        return float(device + host - problem.memory[node])
    return float(max(device - problem.memory[node], host - own))


def _state(problem: Problem, layers: tuple[int, int], keeping: Keeping) -> tuple[float, float]:
    """The bytes of the layers' state on the device, and in the host's memory."""
    workload = problem.workload
    size = float(problem.parameters_before[layers[1]] - problem.parameters_before[layers[0]])
    if keeping.optimizer_state is OptimizerState.DEVICE:
        return size * workload.bytes_kept_per_parameter_byte, size * workload.for_exchanges_per_parameter_byte
    return size * workload.bytes_beside_host_per_parameter_byte, size * workload.host_bytes_per_parameter_byte

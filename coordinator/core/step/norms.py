"""How much of the gradient norm that each stage votes counts.

An island clips all its gradients by one norm. Every stage adds its own norm to that norm. If several parties hold a stage, they
have the same sum of gradients, and their votes must agree (trust/agreement.py). If one party holds it, the other stages show
how far its word is plausible. So no number of one party scales the work of others.

The usual norm of a stage is the median of its last norms, but at most APART times the usual norm of the other stages. Until
enough steps are known, it is the norm of the other stages in the same step. If the other stages rise above their medians, the
usual norm rises as well.

A norm counts up to FACTOR times the usual norm. One bad batch can make the gradients of a single stage hundreds of times larger.
Then the other stages learn next to nothing in that step, even if everybody is honest. So a stage may have few such steps: if MANY
of its last OF norms were LARGE, its norms count up to LARGE times the usual norm.

If a norm is larger, the usual norm counts in its place, and the others go on as if the stage had voted the usual norm. The stage
clips its gradients by its own norm alone (StageBounded). So nothing is lost if this stage is honest, and the others have voted
norms that are too small. The stage's work is audited next, and plans put another party into it (trust/claims.py, witnesses).
If its party turns out to be guilty, all steps since its first bounded norm are undone (act.py).
``python -m tests.bench.norms`` shows how far honest norms stay below the bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dtfm.coordinator.core.state.measured import Norms, StageKey
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust import auditing
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage

FACTOR, LARGE = 10_000.0, 10.0
"""The bound as a multiple of the usual norm: FACTOR if the stage's norms are seldom LARGE, otherwise LARGE."""
MANY, OF = 16, 32
APART = 1000.0
GROWS = 2.0
"""A larger norm is remembered as this many times the usual norm. So the median changes slowly enough for AdamW, whose steps do
not depend on the size of gradients that stay alike."""
REMEMBERED, LEAST = 256, 8
"""The most and the fewest norms for a median."""


def counted(transition: Transition, votes: Mapping[str, wire.StepReady]) -> dict[int, float]:
    """By island, the norm of its gradients that counts, of a step that trains. Logs the stages that are bounded, and remembers
    each stage's norm."""
    before, plan = transition.state, transition.state.ledger.training.in_force
    norms, remembered = dict[int, float](), dict[StageKey, Norms]()
    for island in plan.islands:
        squares = _squares(island, votes)
        said = [math.sqrt(square) for square in squares]
        known = [before.norms.get(key_of(stage), Norms()) for stage in island.stages]
        medians = [median_of(each) for each in known]
        for place, stage in enumerate(island.stages):
            bound = bound_of(known[place], place, said, medians) if _is_one_word(before, stage) else None
            if bound is not None and said[place] > bound.most:
                squares[place] = bound.usual**2
                _tell(transition, stage, said[place], bound)
            remembered[key_of(stage)] = and_another(known[place], said[place], bound)
        norms[island.stages[0].island] = math.sqrt(math.fsum(squares))
    transition.state = replace(transition.state, norms=remembered)
    return norms


def of_changes(plan: Plan, votes: Mapping[str, wire.StepReady]) -> dict[int, float]:
    """By island, the norm of the changes since the last exchange. Nothing is clipped by it."""
    return {island.stages[0].island: math.sqrt(math.fsum(_squares(island, votes))) for island in plan.islands}


def of_own_changes(plan: Plan, votes: Mapping[str, wire.StepReady]) -> dict[int, float]:
    """By island, the norm of its own change since the last exchange; empty with a single island."""
    if len(plan.islands) == 1:
        return {}
    return {
        island.stages[0].island: math.sqrt(
            math.fsum(votes[stage.replicas[0]].squared_change_norm for stage in island.stages)
        )
        for island in plan.islands
    }


def _squares(island: Plan, votes: Mapping[str, wire.StepReady]) -> list[float]:
    return [votes[stage.replicas[0]].squared_gradient_norm for stage in island.stages]


def _is_one_word(state: State, stage: Stage) -> bool:
    """Whether one party alone says the stage's norm, and the norm scales the work of others. A norm scales nothing if nothing is
    clipped. If all members are one party, there are no others."""
    ledger = state.ledger
    parties = {ledger.party(node) for node in stage.replicas}
    return len(parties) == 1 and not ledger.is_alone and ledger.optimizer.clip_norm > 0


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound of a stage's norm in a step: a norm of up to ``most`` counts. For a larger norm, the ``usual`` norm counts.
    ``rise``: how far the other stages are above their usual norms. ``is_known``: whether the stage's own last norms are known."""

    most: float
    usual: float
    rise: float
    is_known: bool


def bound_of(known: Norms, place: int, said: Sequence[float], medians: Sequence[float | None]) -> Bound | None:
    """The bound of the stage at this ``place`` of its island, with its ``known`` norms. By stage of the island, ``said`` has the
    norms of this step, and ``medians`` the medians of the last norms. None: no other stage has any gradients."""
    others = [each for each in range(len(said)) if each != place and said[each] > 0]
    if not others:
        return None
    own, theirs = medians[place], {each: median for each in others if (median := medians[each]) is not None}
    if own is None or not theirs:
        usual = statistics.median_low(said[each] for each in others)
        return Bound(FACTOR * usual, usual, 1.0, is_known=False)
    rise = max(1.0, statistics.median_low(said[each] / median for each, median in theirs.items()))
    usual = rise * min(own, APART * statistics.median_low(theirs.values()))
    often = sum(known.large) >= MANY
    return Bound((LARGE if often else FACTOR) * usual, usual, rise, is_known=True)


def median_of(known: Norms) -> float | None:
    """The median of the last norms; None: too few are known."""
    return statistics.median(known.last) if len(known.last) >= LEAST else None


def and_another(known: Norms, norm: float, bound: Bound | None) -> Norms:
    """The norms with one more. If one party alone says it, at most GROWS times the usual norm is remembered. If the norm does not
    count, the usual norm is remembered in its place."""
    if norm <= 0:
        return known
    remembered, is_large = norm, False
    if bound is not None and norm > bound.most:
        remembered, is_large = bound.usual, bound.is_known
    elif bound is not None and bound.is_known:
        remembered, is_large = min(norm, GROWS * bound.usual), norm > LARGE * bound.usual
    return Norms((*known.last, remembered)[-REMEMBERED:], (*known.large, is_large)[-OF:])


def _tell(transition: Transition, stage: Stage, norm: float, bound: Bound) -> None:
    training = transition.state.ledger.training
    at = training.in_force.stages.index(stage)
    told = norm, bound.most, bound.usual, bound.rise
    transition.emit(ev.StageBounded(training.step + 1, training.generation, at, stage.replicas, *told))
    auditing.audit_next(transition, stage.replicas)


def key_of(stage: Stage) -> StageKey:
    return stage.island, *stage.layers

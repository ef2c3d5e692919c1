"""How much counts of the gradient norm that each stage votes.

An island clips all its gradients by one norm, to which every stage adds its own. Where several parties hold a stage, they have
the same sum of gradients, and their votes must agree (trust/agreement.py). What one party alone says is held against what others
show, so that no number of one party scales the work of others.

The usual norm of a stage is the median of its last ones, and at most APART times that of the other stages. Until enough steps are
known, it is the norm of the other stages in the same step. Where these rise above what is usual, it rises with them.

A norm counts up to FACTOR times the usual one. One bad batch can make the gradients of a single stage hundreds of times larger.
Then the others learn next to nothing in that step, whoever is at fault. So a stage may have few such steps: once MANY of its
last OF norms were LARGE, a norm counts up to LARGE times the usual one.

Of a larger norm the usual one counts. The stage scales its own gradients to that (StageBounded), and the others go on as if that
were its norm. Its work is audited next, and plans put another party beside it (trust/claims.py, witnesses). ``python -m
tests.bench.norms`` shows how far honest norms stay below the bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dtfm.coordinator.core.state import Norms, StageKey, State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust import auditing
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage

FACTOR, LARGE = 10_000.0, 10.0
"""How many times its usual norm a stage's may be, if it is seldom LARGE, and if it is often."""
MANY, OF = 16, 32
APART = 1000.0
GROWS = 2.0
"""So what is usual of a stage takes long to become another. AdamW, to which it does not matter how large gradients always are,
keeps up with it."""
REMEMBERED, LEAST = 256, 8
"""The number of norms from which the median is taken, at most and at least."""


def counted(transition: Transition, votes: Mapping[str, wire.StepReady]) -> dict[int, float]:
    """By island, the norm of its gradients as far as it counts, of a step that trains. Tells of the stages that are bounded, and
    remembers each stage's norm."""
    before, plan = transition.state, transition.state.ledger.training.in_force
    norms, remembered = dict[int, float](), dict[StageKey, Norms]()
    for island in plan.islands:
        squares = _squares(island, votes)
        said = [math.sqrt(square) for square in squares]
        medians = [_median(before, stage) for stage in island.stages]
        for place, stage in enumerate(island.stages):
            bound = _bound(before, stage, place, said, medians) if _is_one_word(before, stage) else None
            if bound is not None and said[place] > bound.most:
                squares[place] = bound.usual**2
                _tell(transition, stage, said[place], bound)
            remembered[key_of(stage)] = _and(before.norms.get(key_of(stage), Norms()), said[place], bound)
        norms[island.stages[0].island] = math.sqrt(math.fsum(squares))
    transition.state = replace(transition.state, norms=remembered)
    return norms


def of_changes(plan: Plan, votes: Mapping[str, wire.StepReady]) -> dict[int, float]:
    """By island, the norm of what all have changed since the last exchange. Nothing is clipped by it."""
    return {island.stages[0].island: math.sqrt(math.fsum(_squares(island, votes))) for island in plan.islands}


def _squares(island: Plan, votes: Mapping[str, wire.StepReady]) -> list[float]:
    return [votes[stage.replicas[0]].squared_gradient_norm for stage in island.stages]


def _is_one_word(state: State, stage: Stage) -> bool:
    """Whether one party alone says the stage's norm, which scales the work of others. It scales nothing where nothing is clipped,
    and where all members are one party's there are no others."""
    ledger = state.ledger
    parties = {ledger.party(node) for node in stage.replicas}
    return len(parties) == 1 and not ledger.is_alone and ledger.optimizer.clip_norm > 0


@dataclass(frozen=True, slots=True)
class _Bound:
    """Up to ``most`` a norm counts, of which ``usual`` is usual in this step. ``rise``: how many times their usual norms those of
    the other stages are. ``is_known``: it follows from the stage's own norms."""

    most: float
    usual: float
    rise: float
    is_known: bool


def _bound(
    state: State, stage: Stage, place: int, said: Sequence[float], medians: Sequence[float | None]
) -> _Bound | None:
    """The bound of the ``stage`` at this ``place`` of its island. ``said`` are the norms of the island's stages in this step, and
    ``medians`` those of each one's last norms. None: no other stage has any gradients."""
    others = [each for each in range(len(said)) if each != place and said[each] > 0]
    if not others:
        return None
    own, theirs = medians[place], {each: median for each in others if (median := medians[each]) is not None}
    if own is None or not theirs:
        usual = statistics.median_low(said[each] for each in others)
        return _Bound(FACTOR * usual, usual, 1.0, is_known=False)
    rise = max(1.0, statistics.median_low(said[each] / median for each, median in theirs.items()))
    usual = rise * min(own, APART * statistics.median_low(theirs.values()))
    often = sum(state.norms[key_of(stage)].large) >= MANY
    return _Bound((LARGE if often else FACTOR) * usual, usual, rise, is_known=True)


def _median(state: State, stage: Stage) -> float | None:
    """Of the stage's last norms; None: there are too few."""
    known = state.norms.get(key_of(stage), Norms()).last
    return statistics.median(known) if len(known) >= LEAST else None


def _and(known: Norms, norm: float, bound: _Bound | None) -> Norms:
    """With one more norm. Of a party's word alone GROWS times the usual norm is remembered at most, and the usual one if it does
    not count."""
    if norm <= 0:
        return known
    remembered, is_large = norm, False
    if bound is not None and norm > bound.most:
        remembered, is_large = bound.usual, bound.is_known
    elif bound is not None and bound.is_known:
        remembered, is_large = min(norm, GROWS * bound.usual), norm > LARGE * bound.usual
    return Norms((*known.last, remembered)[-REMEMBERED:], (*known.large, is_large)[-OF:])


def _tell(transition: Transition, stage: Stage, norm: float, bound: _Bound) -> None:
    training = transition.state.ledger.training
    at = training.in_force.stages.index(stage)
    told = norm, bound.most, bound.usual, bound.rise
    transition.emit(ev.StageBounded(training.step + 1, training.generation, at, stage.replicas, *told))
    auditing.audit_next(transition, stage.replicas)


def key_of(stage: Stage) -> StageKey:
    return stage.island, *stage.layers

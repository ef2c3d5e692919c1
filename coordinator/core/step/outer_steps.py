"""How an exchange applies the sum of the islands' changes: as the run file says or, with `train.outer_rate = "auto"`, by the
outer step that learns most.

Before it votes on an exchange, each island tries a few outer steps: it computes with the weights that each would make, on a few
held-out micro-batches along its own chains. It votes the losses. The coordinator logs the choice with the commit, and the commit
names it, so that all nodes, now and after a restart, apply the same.

A liar cannot choose for others. Each island compares outer steps with the last choice on samples of its own, islands of the same
parties have one voice, and the median counts: an outer step is chosen over the last one only if more than half of the voices say
that it is better (log/outer.py). If most voices lie, they can choose only among OUTER_STEPS, which are all in use elsewhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from dtfm.coordinator.core.refusal import check_number, is_finite, require
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.outer import Looked, outer_step_of
from dtfm.protos import control_pb2 as wire
from dtfm.protos.outer import MOST_OUTER_STEPS, OuterStep
from dtfm.scheduler.model.chains import chains, looked_at
from dtfm.scheduler.model.plan import Plan

NO_MOMENTUM = OuterStep(1.0, 0.0)
"""The mean of the islands' weights."""

OUTER_STEPS = NO_MOMENTUM, OuterStep(0.7, 0.9), OuterStep(1.0, 0.65)
"""The second is DiLoCo's (arXiv 2311.08105). The third has helped small models of ours after a warm-up."""
assert len(OUTER_STEPS) < MOST_OUTER_STEPS

MOST_OF_ROUND = 0.02
"""The most of a round that trying may take, in the mean over exchanges."""

MOST_LOSS = 1e9
"""A loss above this, or no number, counts as this."""


def to_try(state: State, step: int) -> tuple[OuterStep, ...]:
    """The outer steps that nodes try before they vote on ``step``, the last choice first. Empty: none, as there is no choice."""
    training = state.ledger.training
    is_exchange = state.rounds.exchanges(step)
    if not is_exchange or state.run.train.outer_rate != "auto" or not _is_warm(state, step) or not _is_due(state, step):
        return ()
    last = training.outer or NO_MOMENTUM
    return (last, *(each for each in OUTER_STEPS if each != last))


def chosen(state: State, step: int, looked: Looked | None) -> OuterStep:
    """How this exchange applies its sum. ``looked``: what nodes tried."""
    if (named := outer_step_of(state.ledger.run)) is not None:
        return named
    if looked is not None:
        return looked.best
    return (state.ledger.training.outer if _is_warm(state, step) else None) or NO_MOMENTUM


def _is_warm(state: State, step: int) -> bool:
    """Whether the learning rate's warm-up is over. Before that, momentum would carry on changes in directions that soon turn."""
    return state.rounds.progress(step) > state.run.train.warmup_steps


def _is_due(state: State, step: int) -> bool:
    """Whether this exchange tries: if the time that the last trying took is at most MOST_OF_ROUND of the rounds since. The run's
    last exchange always tries, as no other can mend its choice."""
    training = state.ledger.training
    if training.looking is None or step >= state.last_step:
        return True
    (at, took), round_seconds = training.looking, state.rounds.length * (training.step_seconds or 0.0)
    since = (step - training.trained(step)) - (at - training.trained(at))
    return took <= MOST_OF_ROUND * round_seconds * since if round_seconds else True


def ends(plan: Plan) -> Mapping[str, int]:
    """By node that says losses, the number of micro-batches that it looks at under each outer step."""
    found: dict[str, int] = {}
    for numbers in looked_at(plan).values():
        for number in numbers:
            end = chains(plan)[number][-1]
            found[end] = found.get(end, 0) + 1
    return found


def check_looked(vote: wire.StepReady, node: str, plan: Plan, tried: tuple[OuterStep, ...]) -> None:
    """Raises Refused unless the vote has the losses that were asked for, whatever they are."""
    due = len(tried) * ends(plan).get(node, 0) if tried else 0
    require(
        len(vote.looked) == due, "looked", len(vote.looked), f"{due} losses, of each held-out micro-batch that it tries"
    )
    check_number("looking_seconds", vote.looking_seconds, 0, 1e7)


def heard(ledger: Ledger, votes: Mapping[str, wire.StepReady], tried: tuple[OuterStep, ...]) -> Looked | None:
    """What the votes say of the outer steps; None: none were tried."""
    if not tried:
        return None
    plan, of_island = ledger.training.in_force, ends(ledger.training.in_force)
    told: dict[frozenset[str], list[tuple[float, ...]]] = {}
    names: dict[frozenset[str], str] = {}
    for island in plan.islands:
        parties = frozenset(map(ledger.party, island.nodes))
        names.setdefault(parties, str(island.stages[0].island))
        for node in island.nodes:
            number = of_island.get(node, 0)
            for place in range(number):
                told.setdefault(parties, []).append(tuple(map(_counted, votes[node].looked[place::number])))
    losses = {
        names[parties]: tuple(math.fsum(each) / len(each) for each in zip(*of_voice, strict=True))
        for parties, of_voice in told.items()
    }
    seconds = statistics.median(vote.looking_seconds for vote in votes.values())
    return Looked(tried, losses, round(seconds, 3))


def _counted(loss: float) -> float:
    return min(max(loss, -MOST_LOSS), MOST_LOSS) if is_finite(loss) else MOST_LOSS

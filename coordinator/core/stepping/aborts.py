"""A step that cannot be committed is aborted, and settled against whoever is to blame.

Stepping -> Switching: the same plan again, under the next generation; Stepping -> Gathering without those who are to blame.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dtfm.coordinator.core.auditing import conduct, resumption
from dtfm.coordinator.core.charging import quarantine
from dtfm.coordinator.core.ending import fail, fail_or_suspend
from dtfm.coordinator.core.exclusion import NAN_ADVICE, try_without_another
from dtfm.coordinator.core.links import keep_apart
from dtfm.coordinator.core.messages import abort
from dtfm.coordinator.core.plan_adoption import again, regroup
from dtfm.coordinator.core.state import ATTEMPTS, Stepping
from dtfm.coordinator.core.stepping import last_evaluation
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.apart import lost_too_often
from dtfm.coordinator.core.trust.standing import is_alone, weakest
from dtfm.coordinator.core.trust.verdict import (
    Against,
    OfTheRun,
    Unsettled,
    blame,
    blame_for_waiting,
    named_twice,
    times_suspected,
)
from dtfm.coordinator.core.validation.refusal import name_some
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.reach import Pair
from dtfm.coordinator.log.steps import OVERDUE, PEER_LOST, SETTLED, UNAUDITED
from dtfm.protos import control_pb2 as wire

MEMORY_ADVICE = ". Lower train.micro_batch, or add nodes"

_NO_MEMORY = wire.StepProblem.Name(wire.OUT_OF_MEMORY)


def abort_step(transition: Transition, problem: wire.StepProblem, node: str, sentence: str) -> None:
    """Nobody applies the step. It is tried again under the next generation, unless it failed too often."""
    phase, ledger = transition.state.phase, transition.state.ledger
    assert isinstance(phase, Stepping)
    if phase.only_evaluation:
        last_evaluation.give_up(transition, f"{node}: {sentence}", node)
        return
    conduct.interrupted(transition, phase, node)
    name = wire.StepProblem.Name(problem)
    transition.emit(ev.StepAborted(phase.step, ledger.training.generation, name, node, sentence))
    reason = f"step {phase.step}: {name} on {node}: {sentence}"
    send_abort(transition, phase.step, reason)
    advice = _advice(problem)
    failures = _unsettled(ledger, transition.state.ledger.trust.failures)
    also = _unsettled(ledger, transition.state.also)
    lacking = _lack_memory(ledger, (*failures, *also))
    match blame(transition.state.ledger, [who for who, _ in failures], [who for who, _ in also]):
        case OfTheRun() if is_alone(ledger) and not ledger.is_open:
            fail(transition, f"{ATTEMPTS} attempts in a row failed at {reason}{advice}")
        case OfTheRun() if len(lacking) >= 2:  # it is no use to try without one of them
            why = f"{ATTEMPTS} attempts in a row failed at {reason}{MEMORY_ADVICE}"
            fail_or_suspend(transition, lacking, Charge.OUT_OF_MEMORY, why)
            if not transition.state.stopped:
                regroup(transition, reason)
        case OfTheRun():
            try_without_another(transition, f"{ATTEMPTS} attempts in a row failed at {reason}{advice}")
        case Against() as verdict:
            attempts = f"{ATTEMPTS} attempts failed because of it alone; the last at {reason}"
            verdict = replace(verdict, undecided=problem == wire.NON_FINITE)  # that spreads
            quarantine(transition, verdict, _CHARGES[problem], f"{attempts}{advice}")
            regroup(transition, reason)
        case Unsettled():
            again(transition, reason)


def peer_lost(transition: Transition, node: str, peer: str, sentence: str) -> None:
    """A stream between two nodes broke. If the peer is dead, its own stream tells soon. Otherwise the two are kept apart after
    some attempts."""
    phase, ledger = transition.state.phase, transition.state.ledger
    assert isinstance(phase, Stepping)
    if phase.only_evaluation:
        last_evaluation.give_up(transition, f"{node} lost {peer}: {sentence}", node, peer)
        return
    conduct.interrupted(transition, phase, node, lost=peer)
    transition.emit(
        ev.StepAborted(phase.step, ledger.training.generation, PEER_LOST, node, f"lost {peer}: {sentence}", peer)
    )
    resumption.interrupted(transition, phase, by_a_word=True)
    reason = f"step {phase.step}: {node} lost {peer}"
    send_abort(transition, phase.step, reason)
    if pairs := lost_too_often(transition.state.ledger):
        keep_apart(
            transition, pairs, f"lost each other in {len(transition.state.ledger.trust.peer_losses)} attempts in a row"
        )
        regroup(transition, reason)
    else:
        again(transition, reason)


def overdue(transition: Transition, phase: Stepping) -> None:
    """A step exceeded its deadline, though heartbeats came. It is tried again, from where it stands. After ATTEMPTS in a row, it
    is settled against one of those at whom it stood each time."""
    ledger = transition.state.ledger
    plan = ledger.training.plan
    assert plan is not None
    if phase.commit_by is not None:
        return  # the commit comes
    silent = set(plan.nodes) - phase.votes.keys()
    suspects = phase.stalled & silent or silent
    accused = weakest(ledger, suspects)
    sentence = (
        f"no vote from {name_some(silent)} within {phase.deadline - phase.since:g} seconds, though heartbeats came"
    )
    if phase.only_evaluation:
        last_evaluation.give_up(transition, sentence)
        return
    transition.emit(
        ev.StepAborted(
            phase.step, ledger.training.generation, OVERDUE, accused, sentence, suspects=tuple(sorted(suspects))
        )
    )
    resumption.interrupted(transition, phase, by_a_word=False)
    reason = f"step {phase.step}: {sentence}"
    send_abort(transition, phase.step, reason)
    match blame_for_waiting(transition.state.ledger):
        case Against() as verdict:
            times = times_suspected(transition.state.ledger, verdict.members[0])
            quarantine(transition, verdict, Charge.STALLED, f"{times} attempts stood at it; {reason}")
            regroup(transition, reason)
        case Unsettled():
            again(transition, reason)


def settled(transition: Transition, verdict: Against, charge: Charge, reason: str) -> None:
    """The votes of a step contradict each other, or the plan. It is aborted, and goes on without those who are wrong."""
    phase, ledger = transition.state.phase, transition.state.ledger
    assert isinstance(phase, Stepping)
    conduct.interrupted(transition, phase)
    transition.emit(ev.StepAborted(phase.step, ledger.training.generation, SETTLED, verdict.members[0], reason))
    send_abort(transition, phase.step, reason)
    quarantine(transition, verdict, charge, reason)
    regroup(transition, f"{name_some(verdict.members)}: {reason}")


def disputed(transition: Transition, pairs: Collection[Pair], reason: str) -> None:
    """Nodes do not say the same of what passed between them. The step is aborted, and goes on with these pairs kept apart."""
    phase, ledger = transition.state.phase, transition.state.ledger
    assert isinstance(phase, Stepping)
    conduct.interrupted(transition, phase)
    node, _ = min(pairs)
    transition.emit(ev.StepAborted(phase.step, ledger.training.generation, SETTLED, node, reason))
    send_abort(transition, phase.step, reason)
    keep_apart(transition, pairs, "do not say the same of what passed between them")
    regroup(transition, reason)


def unaudited(transition: Transition, node: str, reason: str, leaver: str = "") -> None:
    """The step is aborted, and what was done of it counts no more: what ``node`` did could not be audited, or its leaving has
    interrupted audits."""
    phase, ledger = transition.state.phase, transition.state.ledger
    assert isinstance(phase, Stepping)
    conduct.interrupted(transition, phase, leaver)
    transition.emit(ev.StepAborted(phase.step, ledger.training.generation, UNAUDITED, node, reason))
    send_abort(transition, phase.step, reason)


def send_abort(transition: Transition, step: int, reason: str) -> None:
    plan = transition.state.ledger.training.plan
    assert plan is not None
    transition.send(plan.nodes, abort(plan, step, reason))


def _unsettled(ledger: Ledger, reports: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
    """The reports, but those for which strangers have been suspended: what they lack, others may have."""
    settled = {node for node, problem in reports if problem == _NO_MEMORY and ledger.quarantine_of(node) is not None}
    return [(node, problem) for node, problem in reports if not ledger.is_open or node not in settled]


def _lack_memory(ledger: Ledger, reports: Collection[tuple[str, str]]) -> tuple[str, ...]:
    """Of each party that has said twice that its memory is too small, a name."""
    return named_twice(ledger, [node for node, problem in reports if problem == _NO_MEMORY])


_CHARGES = {
    wire.NON_FINITE: Charge.NON_FINITE,
    wire.OUT_OF_MEMORY: Charge.OUT_OF_MEMORY,
    wire.INTERNAL: Charge.STEP_FAILED,
}


def _advice(problem: wire.StepProblem) -> str:
    match problem:
        case wire.NON_FINITE:
            return NAN_ADVICE
        case wire.OUT_OF_MEMORY:
            return MEMORY_ADVICE
        case _:
            return ""

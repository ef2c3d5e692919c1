"""When several say that a step cannot be done, one alone may make them say so: NaN spreads. So the step is tried without one
party after the other. If it was tried without each and failed, the run itself is at fault. Of those without whom no plan is
possible nothing can be said: among strangers the step waits for more nodes, and people who know each other are told at once.

A run of strangers does not end if the step failed without each of them: two may spoil it in turn. Then one of those who reported
failures is suspended, and the trial starts again without it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dtfm.coordinator.core.charging import quarantine
from dtfm.coordinator.core.ending import fail
from dtfm.coordinator.core.plan_adoption import regroup
from dtfm.coordinator.core.replanning import Decision, Wait, WaitReason, decide
from dtfm.coordinator.core.state import Gathering, State
from dtfm.coordinator.core.timeouts import GRACE_LEASES
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.standing import party_of, weakest
from dtfm.coordinator.core.trust.verdict import Against, against_one
from dtfm.coordinator.core.validation.refusal import name_some
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.events import NodeQuarantined
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.trust import CLEARED_BY

NAN_ADVICE = ". Lower train.learning_rate, lengthen train.warmup_steps, or look at the data"


def try_without_another(transition: Transition, reason: str) -> None:
    """The step in hand has failed, for this ``reason``. It is tried without the party of least standing with which alone it was
    not tried yet; if there is none, without one for which no plan was possible, once there is. If it has failed without each of
    them, the run has; of strangers, one of those who said so is suspended."""
    ledger = transition.state.ledger
    if left := _besides(ledger, ledger.trust.tried_without) or _besides(ledger, ledger.trust.failed_without):
        _bench(transition, weakest(ledger, left), reason)
        return
    if ledger.is_open:
        _suspend_a_sayer(transition, reason)
        return
    _forgive(transition, _suspended(ledger, ledger.training.step))
    fail(transition, reason)


def go_on_if_impossible(transition: Transition) -> None:
    """The rule: if no plan is possible without those who are benched, the step is tried without others. If none is without any
    of them, or without who was suspended for NaN, it waits among strangers, and else the run fails: then it is most likely at
    fault itself, and its owners can do something about it. It waits for those who may return, though."""
    state, ledger = transition.state, transition.state.ledger
    reason = ledger.trust.benched_for or _suspended_for(ledger)
    if state.stopped or not reason or not isinstance(state.phase, Gathering):
        return
    if not _is_impossible(decide(state, transition.now)):
        return
    if left := _besides(ledger, ledger.trust.tried_without) if ledger.trust.benched else []:
        _bench(transition, weakest(ledger, left), reason)
    elif not ledger.is_open and not _may_return(state, transition.now):
        _forgive(transition, _suspended(ledger, ledger.training.step))
        fail(transition, reason)


def found(transition: Transition, benched: tuple[str, ...], reporters: Collection[str]) -> None:
    """A step is committed that could not be done with those who are ``benched``, as these ``reporters`` had said. Who was
    suspended for what they made others report of this step is forgiven. If nobody is benched, it is done without those who
    were suspended because they said so; it was the last of them without whom it could be."""
    ledger = transition.state.ledger
    step, party = ledger.training.step, party_of(ledger)
    if not benched:
        _forgive(transition, [why for why in _suspended(ledger, step - 1) if why.charge is Charge.SPOILS][:-1])
        return
    _forgive(transition, _suspended(ledger, step - 1))
    reason = f"step {step} could not be done with it, and could without it"
    others = tuple(sorted(node for node in set(reporters) if party(node) != party(benched[0])))
    quarantine(transition, Against(benched[:1], others, undecided=True), Charge.SPOILS, reason)


def _besides(ledger: Ledger, those: Collection[str]) -> list[str]:
    """The nodes of the plan that are ready, without the parties of those."""
    party, plan = party_of(ledger), ledger.training.plan
    parties = {party(node) for node in those}
    return [node for node in ledger.ready if plan is not None and node in plan.nodes and party(node) not in parties]


def _is_impossible(decision: Decision) -> bool:
    return isinstance(decision, Wait) and decision.reason in (WaitReason.TOO_FEW_NODES, WaitReason.NO_PLAN)


def _may_return(state: State, now: float) -> bool:
    """Whether somebody has just left who may come back."""
    return any(now - at < GRACE_LEASES * state.lease for at in state.members.left.values())


def _suspended_for(ledger: Ledger) -> str:
    """Whether somebody was suspended for NaN since the last commit, as a sentence; empty: nobody was."""
    names = [why.node for why in _suspended(ledger, ledger.training.step)]
    return (
        f"step {ledger.training.step + 1} is NaN, says {name_some(names)}, and no plan is possible without it{NAN_ADVICE}"
        if names
        else ""
    )


def _suspended(ledger: Ledger, step: int) -> list[NodeQuarantined]:
    """Who was suspended for what it said of the step after this one, which may have come from another."""
    return [why for why in ledger.trust.quarantined.values() if why.is_of_the_step_after(step)]


def _suspend_a_sayer(transition: Transition, reason: str) -> None:
    """The step has failed without each party alone. Of those who said so the one of least standing goes; whether it is among the
    benched counts for nothing here."""
    ledger = transition.state.ledger
    said = {node for node, _ in (*ledger.trust.failures, *transition.state.also)} & ledger.members.keys()
    verdict = against_one(replace(ledger, trust=replace(ledger.trust, benched=())), said)
    why = (
        f"{reason}; it failed without each of them alone, too, and of those who said so this one has the least standing"
    )
    quarantine(transition, replace(verdict, undecided=True, weighed=True), Charge.SPOILS, why)
    regroup(transition, reason)


def _bench(transition: Transition, node: str, reason: str) -> None:
    ledger = transition.state.ledger
    party = party_of(ledger)
    whole = tuple(name for name in ledger.ready if party(name) == party(node))
    transition.emit(ev.NodesBenched(whole, reason))
    regroup(transition, f"to find who is at fault, the step is tried without {name_some(whole)}")


def _forgive(transition: Transition, suspended: Collection[NodeQuarantined]) -> None:
    for why in suspended:
        transition.emit(ev.NodeForgiven(why.node, CLEARED_BY, why.key))

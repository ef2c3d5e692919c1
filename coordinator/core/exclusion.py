"""When several say that a step cannot be done, one alone may make them say so: NaN spreads. So the step is tried without one
party after the other. Who has none of them to blame for it is the run itself."""

from __future__ import annotations

from dtfm.coordinator.core.charging import quarantine
from dtfm.coordinator.core.ending import fail
from dtfm.coordinator.core.plan_adoption import regroup
from dtfm.coordinator.core.replanning import Wait, WaitReason, decide
from dtfm.coordinator.core.state import Gathering
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.standing import party_of, weakest
from dtfm.coordinator.core.trust.verdict import Against
from dtfm.coordinator.core.validation import name_some
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge


def try_without_another(transition: Transition, reason: str) -> None:
    """Tries the step in hand without the party of least standing with which alone it was not tried yet. If there is none, the run
    has failed for this ``reason``."""
    ledger, plan = transition.state.ledger, transition.state.ledger.plan
    party = party_of(ledger)
    tried = {party(node) for node in ledger.tried_without}
    left = [node for node in ledger.ready if plan is not None and node in plan.nodes and party(node) not in tried]
    if not left:
        fail(transition, reason)
        return
    node = weakest(ledger, left)
    whole = tuple(name for name in ledger.ready if party(name) == party(node))
    transition.emit(ev.NodesBenched(whole, reason))
    regroup(transition, f"the step is tried without {name_some(whole)}")


def go_on_if_impossible(transition: Transition) -> None:
    """The rule: if no plan is possible without those who are benched, the step is tried without others."""
    state = transition.state
    if state.stopped or not state.ledger.benched or not isinstance(state.phase, Gathering):
        return
    match decide(state, transition.now):
        case Wait(WaitReason.TOO_FEW_NODES | WaitReason.NO_PLAN):
            try_without_another(transition, state.ledger.benched_for)


def found(transition: Transition, benched: tuple[str, ...]) -> None:
    """A step is committed that could not be done with those who are ``benched``. Who was suspended for what they made others
    report of this step is forgiven."""
    if not benched:
        return
    step = transition.state.ledger.step
    for why in transition.state.ledger.quarantined.values():
        if why.charge is Charge.NON_FINITE and why.step == step - 1:
            transition.emit(ev.NodeForgiven(why.node, "the coordinator", why.key))
    reason = f"step {step} could not be done with it, and could without it"
    quarantine(transition, Against(benched[:1], undecided=True), Charge.SPOILS, reason)

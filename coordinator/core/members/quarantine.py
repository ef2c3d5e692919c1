"""Quarantined nodes take no part. This file has the rule that parts with them, the messages to their peers, and the operator's
commands to expel and forgive. trust/verdict.py decides which node is at fault."""

from __future__ import annotations

from dtfm.coordinator.core.members.leaving import part_with
from dtfm.coordinator.core.refusal import Refused, name_some, shorten
from dtfm.coordinator.core.state.session import Admission
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.verdict import Guilty
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import control_pb2 as wire
from dtfm.protos.identity.access import Role

_UNDECIDED = "it may not be at fault: `dtfm-coordinator forgive {}` lets it come back"


def quarantine(transition: Transition, guilty: Guilty) -> None:
    """The node, with all names of its key, takes no part from now on."""
    ledger, node = transition.state.ledger, guilty.node
    if ledger.quarantine_of(node) is not None:
        return
    party = ledger.party(node)
    key = party if party == ledger.key_of(node) else ""
    reason = f"{guilty.reason}; {_UNDECIDED.format(node)}" if guilty.undecided else guilty.reason
    step = ledger.training.step
    transition.emit(
        ev.NodeQuarantined(node, guilty.charge, shorten(reason), step, guilty.undecided, guilty.against, key)
    )


def refusal_of(ledger: Ledger, node: str) -> Refused | None:
    """The refusal for a node whose access was revoked, or whose key is quarantined; None: neither."""
    if node in ledger.access.revoked:
        return Refused(wire.REVOKED, f"the access of {node!r} was revoked")
    why = ledger.quarantine_of(node)
    if why is None:
        return None
    whose = "" if why.node == node else f", and {node} has its key"
    return Refused(
        wire.QUARANTINED,
        shorten(
            f"{why.node} is quarantined since step {why.step}{whose}: {why.charge}: {why.reason}. An operator can let it "
            f"come back: dtfm-coordinator forgive {why.node}"
        ),
    )


def part_with_excluded(transition: Transition) -> None:
    """Hangs up on all members that have just been quarantined or revoked. Training goes on without them."""
    now, before = transition.state.ledger, transition.before.ledger
    if now.trust.quarantined is before.trust.quarantined and now.access.revoked is before.access.revoked:
        return
    for node in sorted(transition.state.members.sessions):
        session = transition.state.members.sessions.get(node)
        refused = refusal_of(transition.state.ledger, node)
        if session is None or refused is None:
            continue
        refusal = wire.Refusal(reason=refused.reason, sentence=str(refused))
        why = "its access was revoked" if refused.reason == wire.REVOKED else "it is quarantined"
        part_with(transition, session, wire.CoordinatorMessage(refusal=refusal), why)
    _drop_its_description(transition)


def _drop_its_description(transition: Transition) -> None:
    ledger, sessions = transition.state.ledger, transition.state.members.sessions.values()
    by = ledger.described_by
    agreed = any(session.admission is not Admission.JOINED for session in sessions)
    if by and ledger.quarantine_of(by) is not None and not ledger.training.generation and not agreed:
        transition.emit(ev.DescriptionDropped(by))


def tell_peers(transition: Transition) -> None:
    """Tells all members which nodes are quarantined, if the tick has changed that. Certificates stay valid into a quarantine."""
    ledger = transition.state.ledger
    if ledger.trust.quarantined is not transition.before.ledger.trust.quarantined and not transition.state.stopped:
        told = wire.CoordinatorMessage(quarantined=wire.Quarantined(names=ledger.quarantined_names))
        transition.send(transition.state.members.sessions, told)


def expel(transition: Transition, request: wire.ExpelRequest, by: str) -> str:
    """An operator quarantines a node. Returns a sentence. Raises Refused."""
    ledger, node = transition.state.ledger, request.node
    holder = ledger.access.names.get(node)
    if node not in ledger.members and (holder is None or holder.role != Role.NODE):
        known = "`dtfm-coordinator members` shows them"
        raise Refused(wire.MALFORMED, f"there is no node {shorten(repr(node), 80)}; {known}")
    if (why := ledger.quarantine_of(node)) is not None:
        raise Refused(wire.MALFORMED, f"{node} is quarantined already, since step {why.step}: {why.reason}")
    why_said = shorten(request.reason) or "no reason was given"
    quarantine(transition, Guilty(node, Charge.OPERATOR, f"{by} expelled it: {why_said}"))
    ledger = transition.state.ledger
    others = [name for name in ledger.members if name != node and ledger.quarantine_of(name) is not None]
    with_it = f", with {name_some(others)} of the same key" if others else ""
    return f"{node} is quarantined{with_it}; training goes on without it, until it is forgiven"


def forgive(transition: Transition, node: str, by: str) -> str:
    """An operator ends a quarantine. Returns a sentence. Raises Refused."""
    ledger = transition.state.ledger
    if (why := ledger.quarantine_of(node)) is None:
        held = ", ".join([quarantined.node for quarantined in ledger.trust.quarantined.values()][-8:])
        raise Refused(
            wire.MALFORMED, f"{shorten(repr(node), 80)} is not quarantined; those who are: {held or 'nobody'}"
        )
    transition.emit(ev.NodeForgiven(why.node, by, why.key))
    return f"{why.node} may come back, once it is started again; it was quarantined for {why.charge} at step {why.step}"

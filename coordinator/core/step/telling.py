"""Messages to members about the run, for people who lend their devices: how far it is, how fast, and what it waits for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dtfm.coordinator.core.phases import Gathering, Pausing, Switching
from dtfm.coordinator.core.refusal import name_some, shorten
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.step.pause import awaits
from dtfm.coordinator.core.timeouts import HEARTBEAT_LEASES
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log.idle import idle_nodes
from dtfm.coordinator.log.wording import MOST_NAMED, without_addresses
from dtfm.protos import control_pb2 as wire

MOST_TOLD_IDLE = 64
"""The number of idle nodes that are told why they are idle."""


def status(state: State) -> wire.RunStatus:
    """How the run fares now: step, loss, speed, and what it waits for."""
    training = state.ledger.training
    told = wire.RunStatus(
        step=training.step,
        steps=state.last_step,
        generation=training.generation,
        waiting=shorten(without_addresses(awaited(state))),
        lease_seconds=state.lease,
        heartbeat_seconds=state.lease * HEARTBEAT_LEASES,
    )
    if (last := training.last) is not None:
        told.loss, told.tokens, told.seconds = last.loss, last.tokens, 0.0 if last.resumed else last.seconds
    return told


def awaited(state: State) -> str:
    """What training waits for, and why; empty: it goes on."""
    match state.phase:
        case Gathering(reason=reason, said=said):
            waits = ": ".join(filter(None, (reason, "a plan is being made" if state.planner.asked else said)))
            return "; ".join(filter(None, (waits, _preparing(state))))
        case Switching(awaiting=nodes):
            who = name_some(nodes) if len(nodes) <= MOST_NAMED else "most of its nodes"
            return f"plan {state.ledger.training.generation} begins when these have the state of their layers: {who}"
        case Pausing() as phase:
            return awaits(state, phase)
        case _:
            return ""


def _preparing(state: State) -> str:
    """What the nodes that are not ready do; empty if they are many, as each node would be told about each."""
    doing = {name: member.preparing for name, member in state.ledger.members.items() if member.preparing}
    told = ", ".join(f"{name} {does}" for name, does in sorted(doing.items()))
    return told if len(doing) <= MOST_NAMED else ""


def tell(transition: Transition, nodes: Iterable[str]) -> None:
    """Tells these nodes how the run fares."""
    transition.send(nodes, wire.CoordinatorMessage(status=status(transition.state)))


def tell_idle(transition: Transition) -> None:
    """At the end of a tick: tells idle nodes why the plan does without them, when that may have changed."""
    before, ledger = transition.before.ledger, transition.state.ledger
    stays = ledger.reach.changes == before.reach.changes and ledger.leaving == before.leaving
    stays = stays and ledger.health is before.health
    if transition.state.stopped or (stays and ledger.training.plan is before.training.plan):
        return  # before any work for each member
    for node, idle in idle_nodes(ledger, ledger.ready, MOST_TOLD_IDLE).items():
        session = transition.state.members.sessions.get(node)
        if session is not None and session.told_idle != (sentence := shorten(without_addresses(idle.sentence))):
            transition.set_session(replace(session, told_idle=sentence))
            told = status(transition.state)
            told.idle = sentence
            transition.send([node], wire.CoordinatorMessage(status=told))


def tell_changes(transition: Transition) -> None:
    """At the end of a tick: tells all members when training waits for something new, and after a commit the others outside the
    plan."""
    before, state = transition.before, transition.state
    if state.stopped:
        return
    sessions, training = state.members.sessions, state.ledger.training
    members_stay = state.ledger.members is before.ledger.members
    stays = state.phase is before.phase and state.planner is before.planner and members_stay
    if (not stays and awaited(state) != awaited(before)) or state.run is not before.run:
        tell(transition, sessions)
    elif training.step != before.ledger.training.step:
        tell(transition, sessions.keys() - set(training.plan.nodes if training.plan is not None else ()))

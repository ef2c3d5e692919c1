"""Nodes that hang: they send heartbeats, but do nothing while others wait for them. Their heartbeats say so (Heartbeat.work)."""

from __future__ import annotations

from collections.abc import Iterable

from dtfm.coordinator.core.findings import Setback, Unwell
from dtfm.coordinator.core.phases import Pausing, Phase, Stepping, Switching
from dtfm.coordinator.core.plan.expected import longest_layer_seconds, step_seconds
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.step import votes
from dtfm.coordinator.core.timeouts import COMPILE_LEASES, HUNG_LEASES, SIGN_OF_LIFE_LEASES, STEP_FACTOR
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.steps import OVERDUE

FIX = "look at its device, and start the node again if it stays so"


def leave_out_hung(transition: Transition) -> bool:
    """Leaves out nodes that have done nothing for a lease and the time of a step. All other awaited nodes must have done their
    part, or wait. Returns whether the phase is given up. If all nodes wait for each other, some node is wrong about its progress:
    the step is overdue."""
    state, phase = transition.state, transition.state.phase
    hung, waits = dict[str, float](), list[float]()
    for node in _awaited(state, phase):
        session = state.members.sessions.get(node)
        work = session.work if session is not None else None
        if session is None or work is None or transition.now - session.heard > SIGN_OF_LIFE_LEASES * state.lease:
            return False
        idle = transition.now - max(work.since, _since(phase), state.members.hearing)
        if work.waits:
            waits.append(idle - _most(state, phase, node))
        elif idle <= _most(state, phase, node):
            return False  # the node still works
        else:
            hung[node] = idle
    if hung:
        _leave_out(transition, hung)
    elif isinstance(phase, Stepping) and waits and min(waits) > state.lease:
        votes.step_overdue(transition, phase)
    else:
        return False
    return True


def _awaited(state: State, phase: Phase) -> Iterable[str]:
    match phase:
        case Stepping(commit_by=None, votes=votes):
            return sorted(set(state.ledger.training.in_force.nodes) - votes.keys())
        case Switching(awaiting=nodes) | Pausing(awaiting=nodes):
            return sorted(nodes)
        case _:
            return ()


def _since(phase: Phase) -> float:
    assert isinstance(phase, Stepping | Switching | Pausing)
    return phase.since


def _most(state: State, phase: Phase, node: str) -> float:
    """The seconds for which the node may show no progress."""
    lease, training = state.lease, state.ledger.training
    if isinstance(phase, Switching):
        return HUNG_LEASES * lease + STEP_FACTOR * longest_layer_seconds(state, node)
    begins = training.last is None or training.last.generation != training.generation or state.evaluation is not None
    compiles = COMPILE_LEASES * lease if begins and state.run.train.compile else 0.0
    return HUNG_LEASES * lease + (step_seconds(state) or 0.0) + compiles


def _leave_out(transition: Transition, hung: dict[str, float]) -> None:
    phase, generation = transition.state.phase, transition.state.ledger.training.generation
    unwell = []
    for node, idle in hung.items():
        why = f"{node} has done nothing for {idle:.3g} seconds while others wait for it, though heartbeats came; {FIX}"
        unwell.append(Unwell(node, OVERDUE, why))
        if isinstance(phase, Switching):
            transition.emit(ev.PlanFailed(generation, node, why, silent=True))
    transition.find(
        Setback(OVERDUE, unwell[0].node, unwell[0].why, unwell=tuple(unwell), lost_state=isinstance(phase, Switching))
    )

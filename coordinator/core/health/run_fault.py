"""When failures of nodes are the run's own fault. Then a run among people who know each other ends, and says what to change."""

from __future__ import annotations

from dtfm.coordinator.core.state.state import ATTEMPTS, State
from dtfm.coordinator.log.health import PLAN_FAILED
from dtfm.protos import control_pb2 as wire

NON_FINITE, OUT_OF_MEMORY, INTERNAL = map(wire.StepProblem.Name, (wire.NON_FINITE, wire.OUT_OF_MEMORY, wire.INTERNAL))
OF_ITSELF = frozenset({NON_FINITE, OUT_OF_MEMORY, INTERNAL, PLAN_FAILED})
"""Failures that nodes report about themselves. A slow or hanging node shows nothing about the run."""


def fault_of_the_run(state: State, node: str) -> str:
    """Why the run itself is at fault, now that the node has failed; empty: it is not known to be at fault.

    It is at fault if two parties have failed in the same way since the last commit, each in ATTEMPTS - 1 attempts. If there is
    one party alone, ATTEMPTS attempts that failed in this way are enough, as plans found no way round. They are also enough if
    the node's loss is not finite and too few other nodes are left for the run's stages. Among strangers the run is never at
    fault: any two could say so.
    """
    ledger = state.ledger
    newest = ledger.health.get(node)
    if ledger.is_open or newest is None or newest.problem not in OF_ITSELF:
        return ""
    alike = {
        name: each.alike
        for name, each in ledger.health.items()
        if name in ledger.members and (each.problem, each.commits) == (newest.problem, ledger.trust.commits)
    }
    several = {ledger.party(name) for name, times in alike.items() if times >= ATTEMPTS - 1}
    others = sum(ledger.party(name) != ledger.party(node) for name in ledger.ready)
    pinned = state.run.cluster.pinned
    stages = len(pinned) if isinstance(pinned, tuple) else pinned or 1
    times, is_alone = sum(alike.values()), ledger.is_alone or not others
    is_needed = newest.problem == NON_FINITE and others < stages and newest.alike >= ATTEMPTS
    if len(several) > 1 or is_needed or (is_alone and times >= ATTEMPTS):
        return f"{times} attempts in a row failed; the last: {newest.why}"
    return ""

"""When the run itself is at fault that nodes fail: among people who know each other it ends, and says what to change."""

from __future__ import annotations

from dtfm.coordinator.core.state import ATTEMPTS, State
from dtfm.coordinator.log.health import PLAN_FAILED

OF_ITSELF = frozenset({"NON_FINITE", "OUT_OF_MEMORY", "INTERNAL", PLAN_FAILED})
"""What nodes say of themselves. That they are slow or hang says nothing of the run."""


def fault_of_the_run(state: State, node: str) -> str:
    """Why the run itself is at fault, now that the node has failed; empty: it is not known to be.

    It is if another party has failed in the same way since the last commit, each in ATTEMPTS - 1 attempts; or if there is one
    party alone, and ATTEMPTS attempts have failed so: plans found no way round it. Among strangers it never is: any two could
    say so.
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
    is_alone = ledger.is_alone or {ledger.party(name) for name in ledger.ready} == {ledger.party(node)}
    times = sum(alike.values())
    if len(several) > 1 or (is_alone and times >= ATTEMPTS):
        return f"{times} attempts in a row failed; the last: {newest.why}"
    return ""

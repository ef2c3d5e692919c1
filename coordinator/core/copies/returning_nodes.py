"""Nodes that may return with state that is nowhere else: which to wait for, and until when."""

from __future__ import annotations

from dtfm.coordinator.core.copies.availability import availability
from dtfm.coordinator.core.phases import Gathering
from dtfm.coordinator.core.state import State
from dtfm.coordinator.core.timeouts import GRACE_LEASES


def worth_waiting(state: State, phase: Gathering, now: float) -> str:
    """Says for whom training waits and how long, as a sentence. It is empty if nothing would be lost, if nobody may return, or if
    training has waited long enough: as long as redoing the lost steps would take, and at most GRACE_LEASES unless the run would
    start over. After a restart of the coordinator it waits at least GRACE_LEASES, as its nodes come back then: those of other
    islands, too, which have weights and moments of their own."""
    table, training, grace = availability(state), state.ledger.training, GRACE_LEASES * state.lease
    absent = {copy.node for bucket in (*table.memory, *table.disks) for copy in bucket if not copy.here}
    returning = absent.difference(state.members.ended)
    with_them, without = table.resume_point(returning), table.resume_point()
    if with_them.step <= without.step:
        gone, members = {*state.members.ended, *state.ledger.ready}, state.ledger.members
        held = {who for layer in training.held for who in layer if who[0] not in gone}
        others = sorted(node for node, process in held if node not in members or members[node].incarnation == process)
        if not training.islands or not others or state.planner.has_planned or now >= phase.since + grace:
            return ""
        return f"up to {grace:.3g} seconds for {', '.join(others)} to return with what their islands have learnt"
    waiting = now if phase.waiting is None else phase.waiting
    patience = (with_them.step - without.step) * (training.step_seconds or 0.0)
    if without.step:
        patience = min(patience, grace)
    nodes, until = table.needed(with_them, returning), waiting + patience
    if not state.planner.has_planned:
        until = max(until, phase.since + grace)
    if now >= until:
        return ""
    return (
        f"up to {until - waiting:.3g} seconds for {', '.join(sorted(nodes))} to return with the state as of step "
        f"{with_them.step}; otherwise training goes back to step {without.step}"
    )

"""Nodes that may return with state without which training would go back: which to wait for, and until when."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dtfm.coordinator.core.copies.availability import availability
from dtfm.coordinator.core.phases import Gathering
from dtfm.coordinator.core.state import State
from dtfm.coordinator.core.timeouts import GRACE_LEASES


@dataclass(frozen=True, slots=True)
class Return:
    """``nodes`` may return with the state as of ``step``; without them training goes back to step ``otherwise``. Training waits
    for them ``until`` then."""

    nodes: tuple[str, ...]
    step: int
    otherwise: int
    until: float


def worth_waiting(state: State, phase: Gathering, now: float) -> Return | None:
    """The return that saves more than waiting for it costs; None: nothing would be lost, nobody may return, or training has
    waited long enough. It waits at most as long as redoing the lost steps would take, and at most GRACE_LEASES; after a
    restart always GRACE_LEASES, since nodes should notice only a pause."""
    table = availability(state)
    absent = {copy.node for bucket in (*table.memory, *table.files) for copy in bucket if not copy.here}
    returning = {node for node in absent if now < _awaited_until(state, phase, node)}
    with_them, without = table.resume_point(returning), table.resume_point()
    if with_them.step <= without.step:
        return None
    nodes = table.needed(with_them, returning)
    waiting = now if phase.waiting is None else phase.waiting
    seconds = state.ledger.training.step_seconds if state.planner.has_planned else None
    worth = math.inf if seconds is None else (with_them.step - without.step) * seconds
    patience = min(worth, GRACE_LEASES * state.lease)
    until = min(waiting + patience, max(_awaited_until(state, phase, node) for node in nodes))
    return Return(tuple(sorted(nodes)), with_them.step, without.step, until) if now < until else None


def _awaited_until(state: State, phase: Gathering, node: str) -> float:
    """The time until which the node may still return. After a restart, all former members may."""
    if node in state.members.sessions:
        return math.inf
    lost = state.members.left.get(node, -math.inf if state.planner.has_planned else phase.since)
    return lost + GRACE_LEASES * state.lease

"""Nodes that may come back with state that training would else go back behind: for whom to wait, and until when."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dtfm.coordinator.core import snapshot, standby
from dtfm.coordinator.core.state import GRACE_LEASES, Gathering, Session, Standing, State


@dataclass(frozen=True, slots=True)
class Return:
    """Of ``nodes``, which may still have the state as of ``step``; without them training goes back to step ``otherwise``. They
    are waited for ``until`` then."""

    nodes: tuple[str, ...]
    step: int
    otherwise: int
    until: float


def worth_waiting(state: State, phase: Gathering, now: float) -> Return | None:
    """The return that would save more than to wait for it costs; None: nothing would be lost, nobody may come, or they were
    waited for long enough. That is as long as it takes to train again what would be lost, and at most GRACE_LEASES; the whole of
    these after a restart, of which the nodes shall notice nothing but a pause."""
    otherwise = _reachable(state)
    whole = state.ledger.backup.step if state.ledger.backup is not None else 0
    for step, nodes in ((state.ledger.step, _with_memory(state, phase, now)), (whole, _with_disks(state, phase, now))):
        if step > otherwise and nodes:
            waiting = now if phase.waiting is None else phase.waiting
            seconds = state.ledger.step_seconds if state.gathered else None
            worth = math.inf if seconds is None else (step - otherwise) * seconds
            patience = min(worth, GRACE_LEASES * state.lease)
            until = min(waiting + patience, max(_awaited_until(state, phase, node) for node in nodes))
            return Return(tuple(sorted(nodes)), step, otherwise, until) if now < until else None
    return None


def _reachable(state: State) -> int:
    """The step from which those that are here can go on."""
    held = state.ledger.step if all(_holders(state)) else 0
    return max(held, state.ledger.checkpoint_step, snapshot.restorable_step(state))


def _holders(state: State) -> list[set[str]]:
    """Per layer, the nodes that are ready and hold its state in memory."""
    ready = set(state.ready)
    holders = [ready.intersection(layer) for layer in state.ledger.holders] or [set[str]()]
    for node, layers in standby.copies(state) if state.ledger.held else ():
        for layer in range(*layers):
            holders[layer].add(node)
    return holders


def _with_memory(state: State, phase: Gathering, now: float) -> set[str]:
    """Those that may come back as the processes they were, if they and the ready ones hold all of the state then."""
    awaited: set[str] = set()
    for who, here in zip(state.ledger.held, _holders(state), strict=False):
        absent = {node for node, process in who if _may_return(state, phase, now, node, process)}
        if not here and not absent:
            return set()
        awaited |= set() if here else absent
    return awaited


def _with_disks(state: State, phase: Gathering, now: float) -> set[str]:
    """Those that may come back with their disks, if all of the backup is there then."""
    whole = state.ledger.backup
    if whole is None:
        return set()
    lacking = set(range(len(whole.parts))).difference(*(s.kept.get(whole.step, ()) for s in state.sessions.values()))
    coming = {
        node: lacking & snapshot.held(whole, node) for node in whole.holders if _may_return(state, phase, now, node)
    }
    return {node for node, some in coming.items() if some} if lacking == set().union(*coming.values()) else set()


def _may_return(state: State, phase: Gathering, now: float, node: str, process: str | None = None) -> bool:
    """Whether the node, or that ``process`` of it, is to be reckoned with, though it is not ready. One that has said what is on
    its disk is not waited for because of that."""
    session = state.sessions.get(node)
    if session is None:
        return now < _awaited_until(state, phase, node)
    return session.standing is Standing.JOINED if process is None else _is_coming(session, process)


def _is_coming(session: Session, process: str) -> bool:
    return session.standing is not Standing.READY and process == f"{session.incarnation:016x}"


def _awaited_until(state: State, phase: Gathering, node: str) -> float:
    """Until when the node counts as one that may come back. After a restart, all may that were there before."""
    if node in state.sessions:
        return math.inf
    return state.left.get(node, -math.inf if state.gathered else phase.since) + GRACE_LEASES * state.lease

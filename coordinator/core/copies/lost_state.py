"""State that is lost: which nodes to wait for, where training resumes, and when an operator has to decide."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dtfm.coordinator.core.copies.availability import Availability, Kind, ResumePoint, availability
from dtfm.coordinator.core.phases import Gathering
from dtfm.coordinator.core.refusal import name_some
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.timeouts import CUT_OFF_LEASES, GRACE_LEASES
from dtfm.coordinator.log.wording import duration_in_words
from dtfm.protos.printable import counted

ASK_SECONDS = 600.0
"""Before this many seconds of work are given up, an operator is asked. If less is lost, training goes back by itself."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """Why nothing trains, as a ``sentence``. ``asks``: an operator has to decide how to go on, and the sentence names the
    commands."""

    sentence: str
    asks: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """Where copies of the state are, and where training can resume from them."""

    table: Availability
    here: ResumePoint
    """Where training can resume with the nodes that are ready."""
    returning: frozenset[str]
    """Nodes that are not ready and may come back by themselves with state."""
    soon: ResumePoint
    """Where training can resume if the ``returning`` nodes are back too."""
    away: frozenset[str]
    """All nodes that are not ready and have state. Of nodes that said goodbye only the disks count."""
    ever: ResumePoint
    """Where training can resume if all ``away`` nodes are back."""
    weights: int
    """The step of the newest weights in a checkpoint, if they are newer than ``here``; otherwise 0."""


def awaited(state: State, phase: Gathering, now: float) -> Awaited | None:
    """What training waits for before it goes back. None: no state is lost, or training goes back now."""
    lost, training = what_is_lost(state, now), state.ledger.training
    if lost.here.step >= training.step or _is_over(state):
        islands = _islands_that_return(state, phase, now) if lost.soon.step <= lost.here.step else ""
        return Awaited(islands) if islands else None
    point = _goes_back_to(state, lost)
    if lost.soon.step > (lost.here if point is None else point).step:
        until = _waits_until(state, phase, now, lost, point)
        waiting = now if phase.waiting is None else phase.waiting
        if now < until:
            nodes = lost.table.needed(lost.soon, lost.returning)
            then = f"otherwise training goes back to step {point.step}" if point is not None else "then it asks"
            who = ", ".join(sorted(nodes))
            return Awaited(
                f"up to {until - waiting:.3g} seconds for {who} to return with the state as of step {lost.soon.step}; {then}"
            )
    return None if point is not None else Awaited(_question(state, lost), asks=True)


def resume_point(state: State, now: float) -> ResumePoint | None:
    """Where training resumes if it waits for no node. None: an operator has to decide."""
    return _goes_back_to(state, what_is_lost(state, now))


def what_is_lost(state: State, now: float) -> Lost:
    """Where the state is, with and without the nodes that are away."""
    table, copies = _without_those_that_gave_up(state, availability(state), now), state.ledger.copies
    in_memory = {copy.node for layer in table.memory for copy in layer if not copy.here}
    on_disks = {copy.node for bucket in table.disks for copy in bucket if not copy.here}
    returning = (in_memory | on_disks).difference(state.members.ended)
    here, ever = table.resume_point(), table.resume_point(on_disks)
    soon = table.resume_point(returning)
    newest = max((step for step, each in copies.checkpoints.items() if each.weights), default=0)
    weights = newest if newest > here.step else 0
    return Lost(
        table, here, frozenset(returning), soon, frozenset(returning | on_disks), max(soon, ever, key=_step), weights
    )


def _step(point: ResumePoint) -> int:
    return point.step


def _is_over(state: State) -> bool:
    """Whether no step follows and the last step's weights are in a checkpoint, so that no state is needed."""
    return state.is_closing and state.ledger.training.step in state.ledger.copies.checkpoints


def _goes_back_to(state: State, lost: Lost) -> ResumePoint | None:
    """Where training resumes. None: too much work would be lost."""
    training = state.ledger.training
    if lost.here.step >= training.step or _is_over(state):
        return lost.here
    # A whole snapshot is the newest complete state, unless something newer is somewhere.
    newest = training.step if lost.here.kind is None else max(lost.ever.step, lost.weights)
    begins_again = lost.here.kind is None and lost.weights > 0
    if training.work.between(lost.here.step, newest) < ASK_SECONDS and not begins_again:
        return lost.here
    match state.run.cluster.when_state_is_lost:
        case "weights" if lost.weights:
            return ResumePoint(lost.weights, Kind.WEIGHTS)
        case "start":
            return lost.here
        case _:
            return None


def _without_those_that_gave_up(state: State, table: Availability, now: float) -> Availability:
    """The table without the memory of nodes that looked for the coordinator in vain and ended."""
    gave_up = {
        copy.node
        for layer in table.memory
        for copy in layer
        if not copy.here and now >= _holds_out_until(state, copy.node)
    }
    memory = tuple(tuple(copy for copy in layer if copy.node not in gave_up) for layer in table.memory)
    return replace(table, memory=memory)


def _holds_out_until(state: State, node: str) -> float:
    """When an absent node gives up looking for the coordinator, and ends. A node that left before this process of the coordinator
    began is treated as if it had left at that time."""
    members = state.members
    heard = members.away[node].heard if node in members.away else members.hearing
    if node in members.sessions or math.isinf(heard):
        return math.inf
    return heard + state.run.cluster.wait_for_coordinator


def _waits_until(state: State, phase: Gathering, now: float, lost: Lost, point: ResumePoint | None) -> float:
    """The time until which training waits for the nodes that may return.

    That is as long as it takes to train the lost steps again. If a snapshot is here, or if the operator is asked next, it is at
    most GRACE_LEASES. Nodes that fell silent while they trained may be cut off from the coordinator alone, and get
    CUT_OFF_LEASES. Nodes that are back get GRACE_LEASES to become ready. So do all nodes after a restart of the coordinator.
    """
    grace, cut_off = GRACE_LEASES * state.lease, CUT_OFF_LEASES * state.lease
    until = now if phase.waiting is None else phase.waiting
    if point is None:
        until += grace
    else:
        patience = state.ledger.training.work.between(point.step, lost.soon.step)
        until += min(patience, grace) if point.step else patience
    if not state.planner.has_planned:
        until = max(until, phase.since + grace)
    for node in lost.table.needed(lost.soon, lost.returning):
        if (away := state.members.away.get(node)) is None:
            continue
        if away.back is not None:
            until = max(until, away.back + grace)
        elif away.silent and lost.soon.kind is Kind.MEMORY:
            until = max(until, min(away.heard + cut_off, _holds_out_until(state, node)))
    return until


def _islands_that_return(state: State, phase: Gathering, now: float) -> str:
    """The islands that training waits for after a restart of the coordinator. No state would be lost without them, but each
    island has weights and moments of its own."""
    training, grace = state.ledger.training, GRACE_LEASES * state.lease
    gone, members = {*state.members.ended, *state.ledger.ready}, state.ledger.members
    held = {who for layer in training.held for who in layer if who[0] not in gone}
    others = sorted(node for node, process in held if node not in members or members[node].incarnation == process)
    if not training.islands or not others or state.planner.has_planned or now >= phase.since + grace:
        return ""
    return f"up to {grace:.3g} seconds for {', '.join(others)} to return with the state of their islands"


def _question(state: State, lost: Lost) -> str:
    """The question to an operator: what state there is, the commands, and the price of each."""
    answers = []
    if lost.ever.step > lost.here.step:
        needed = name_some(lost.table.needed(lost.ever, lost.away))
        price = _price(state, lost.ever.step)
        if lost.ever.kind is Kind.MEMORY:
            answers.append(f"reconnect {needed}, which may still have step {lost.ever.step} in memory ({price})")
        else:
            answers.append(f"start {needed} again, with part of step {lost.ever.step} on disk ({price})")
    if lost.here.kind is not None:
        step = lost.here.step
        answers.append(f"`dtfm-coordinator rollback {step}`: from a whole snapshot ({_price(state, step)})")
    if lost.weights:
        what = f"from step {lost.weights} without AdamW's moments ({_price(state, lost.weights)})"
        answers.append(f"`dtfm-coordinator continue --from weights`: {what}")
    answers.append(f"`dtfm-coordinator continue --from start` ({_price(state, 0)})")
    return f"nobody here has the state of step {state.ledger.training.step}. To go on: {', or '.join(answers)}"


def _price(state: State, step: int) -> str:
    """What is lost by going back to the step."""
    training = state.ledger.training
    if step >= training.step:
        return "no step is lost"
    took, steps = duration_in_words(training.work.between(step, training.step)), training.step - step
    return f"{counted(steps, 'step')} {'is' if steps == 1 else 'are'} lost, {took} of work"

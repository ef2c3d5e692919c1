"""Carries out findings, which happens nowhere else, in one order (`_set_back`).

First the current work is given up, and suspicions go into the log. Then the guilty are quarantined, and pairs are kept apart. If
the state is in doubt, the run goes back. Then the run goes on, by the same plan or by another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dtfm.coordinator.core.copies import checkpoints, keeping_up, snapshot
from dtfm.coordinator.core.copies.availability import is_under_way
from dtfm.coordinator.core.ending import fail
from dtfm.coordinator.core.findings import Doubt, Gone, OtherPrecision, Setback, Unwell
from dtfm.coordinator.core.health import broken_pairs, failing_nodes
from dtfm.coordinator.core.health.run_fault import fault_of_the_run
from dtfm.coordinator.core.members import welcoming
from dtfm.coordinator.core.members.quarantine import quarantine
from dtfm.coordinator.core.messages import abort
from dtfm.coordinator.core.phases import Gathering, Stepping, Switching
from dtfm.coordinator.core.plan.adoption import adopt, again, regroup
from dtfm.coordinator.core.plan.replanning import decide, drop_stale_choice
from dtfm.coordinator.core.plan.undoing import undo
from dtfm.coordinator.core.plan.waiting import Wait, WaitReason
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.step import evaluation, pause
from dtfm.coordinator.core.step.commits import commit
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust import auditing
from dtfm.coordinator.core.trust.verdict import Guilty, Verdict, unseparable, verdict
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.steps import NODE_LEFT, OVERDUE, UNAUDITED

STEPS_BETWEEN = 10
"""If work is audited, the least number of steps between two steps that resume with the work done so far: these cannot be
audited."""


def carry_out(transition: Transition) -> None:
    """Carries out all findings, in order, and the findings that follow from them."""
    while transition.findings and not transition.state.stopped:
        match transition.findings.pop(0):
            case tuple() as doubts:
                _suspect(transition, doubts)
                _sentence(transition, verdict(transition.state))
            case Unwell() as unwell:
                _leave_out(transition, [unwell])
            case Setback() as setback:
                _set_back(transition, setback)
            case Gone(node, reason):
                _go_on_without(transition, node, reason)
            case OtherPrecision(precision, by):
                decisions = transition.state.members.decisions + 1
                transition.set_members(replace(transition.state.members, decisions=decisions))
                welcoming.compute_in(transition, precision, by)


def separate_or_quarantine(transition: Transition) -> None:
    """The rule: if no plan is possible without a disputed pair, one of the two goes."""
    state = transition.state
    if state.stopped or not isinstance(state.phase, Gathering) or not state.ledger.trust.suspicions:
        return
    match decide(state, transition.now):
        case Wait(WaitReason.NO_PLAN) if (guilty := unseparable(state)) is not None:
            quarantine(transition, guilty)


def _set_back(transition: Transition, setback: Setback) -> None:
    if setback.mismatch is not None:
        transition.emit(setback.mismatch)
    doubts = (*setback.doubts, *_give_up(transition, setback))
    if setback.problem == OVERDUE:
        transition.state = replace(transition.state, stalled=transition.state.ledger.trust.commits)
    _leave_out(transition, setback.unwell)
    if transition.state.stopped:
        return
    _suspect(transition, doubts)
    if setback.proven is not None:
        found = Verdict((Guilty(setback.node, setback.proven, setback.reason),))
    else:
        found = verdict(transition.state) if doubts else Verdict()
    since = _in_doubt_since(transition.state, setback, found)
    _sentence(transition, found)
    if transition.state.stopped:
        return
    if since is not None:
        undo(transition, since, setback.reason)
    changed = found.guilty or found.apart or setback.unwell or setback.since is not None or setback.lost_state
    if changed or isinstance(transition.state.phase, Gathering):
        regroup(transition, setback.reason)
    elif setback.switches and (chosen := transition.state.planner.chosen) is not None:
        adopt(transition, chosen, setback.reason)
    else:
        again(transition, setback.reason)


def _in_doubt_since(state: State, setback: Setback, found: Verdict) -> int | None:
    """The step since which work is in doubt; None: no work is. While a guilty party's stages were bounded, they learnt as little
    as its norms allowed."""
    ledger = state.ledger
    parties = {ledger.party(guilty.node) for guilty in found.guilty} & ledger.trust.bounded.keys()
    steps = [ledger.trust.bounded[party].first - 1 for party in parties]
    if setback.since is not None and not (setback.unless_settled and found.guilty):
        steps.append(setback.since)
    return min(steps, default=None)


def _give_up(transition: Transition, setback: Setback) -> tuple[Doubt, ...]:
    """Has the current step given up, if there is one. Returns the doubts about a node that may have ended it because of an
    audit."""
    phase, ledger = transition.state.phase, transition.state.ledger
    if not isinstance(phase, Stepping):
        return ()
    has_left = setback.lost_state and not setback.doubts  # the node may be connected again by now
    ended_it = has_left or setback.unwell or any(setback.node in doubt.by for doubt in setback.doubts)
    doubts = auditing.interrupted(transition, phase, setback.node if ended_it else "")
    reason = setback.reason
    transition.emit(ev.StepAborted(phase.step, ledger.training.generation, setback.problem, setback.node, reason))
    before = transition.state.overdue
    if setback.problem == OVERDUE and not (before is not None and 0 < phase.step - before <= STEPS_BETWEEN):
        transition.state = replace(transition.state, overdue=phase.step)
    plan = ledger.training.in_force
    what = reason if setback.problem == NODE_LEFT else f"{setback.problem} on {setback.node}: {reason}"
    message = abort(plan, phase.step, f"step {phase.step}: {what}")
    transition.send(plan.nodes, message)
    return doubts


def _suspect(transition: Transition, doubts: Iterable[Doubt]) -> None:
    """Logs the suspicions. Of each party in doubt only one name is logged, since a party counts once."""
    for doubt in doubts:
        training, party = transition.state.ledger.training, transition.state.ledger.party
        one = {party(node): node for node in (*reversed(doubt.nodes), *doubt.by)}.values()
        suspects = tuple(node for node in doubt.nodes if node in one)
        transition.emit(
            ev.Suspected(training.step + 1, training.generation, doubt.charge, suspects, doubt.reason, doubt.by)
        )


def _leave_out(transition: Transition, unwell: Iterable[Unwell]) -> None:
    """Plans leave out these nodes and pairs from now on. If several nodes fail alike, the run may be at fault: then it ends."""
    for each in unwell:
        if each.peer:
            broken_pairs.lost(transition, each.node, each.peer, each.why)
        else:
            failing_nodes.failed(transition, each.node, each.problem, each.why)
            if fault := fault_of_the_run(transition.state, each.node):
                fail(transition, fault)
                return
    drop_stale_choice(transition)


def _sentence(transition: Transition, found: Verdict) -> None:
    for guilty in found.guilty:
        quarantine(transition, guilty)


def _go_on_without(transition: Transition, node: str, reason: str) -> None:
    """A node of the plan has left. A step that all have voted for still counts, if no audit is open, and connected nodes still
    have every stage's new state."""
    phase, cause = transition.state.phase, f"{node} left ({reason})"
    if (
        isinstance(phase, Stepping)
        and phase.commit_by is not None
        and not phase.audits
        and keeping_up.next_step_survives(transition.state)
    ):
        commit(transition, phase)
        if transition.state.stopped:
            return
    evaluation.node_left(transition, node)
    snapshot.go_on(transition)  # whether the last checkpoint comes is asked below
    checkpoints.go_on(transition)
    pause.node_left(transition, node)
    phase = transition.state.phase
    if isinstance(phase, Stepping):
        problem = UNAUDITED if phase.audits else NODE_LEFT
        _set_back(transition, Setback(problem, node, cause, lost_state=True))
    elif isinstance(phase, Switching) or not _last_checkpoint_comes(transition):
        regroup(transition, cause)  # otherwise the last checkpoint is under way: the others can finish it


def _last_checkpoint_comes(transition: Transition) -> bool:
    """Whether no step follows, and the checkpoint of the last one is whole or under way."""
    state, step = transition.state, transition.state.ledger.training.step
    return state.is_closing and (state.ledger.copies.is_safe(step) or is_under_way(state, step))

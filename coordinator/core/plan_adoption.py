"""Adopting a plan: its generation, where its state comes from, who could not take part.

Any phase -> Switching by `adopt`, or the run's end if nothing is left to do; Switching -> Gathering by `plan_failed`. When all
nodes are ready, stepping/beginning.py begins the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dtfm.coordinator.core.auditing.resumption import counts_from
from dtfm.coordinator.core.charging import quarantine
from dtfm.coordinator.core.ending import fail_or_suspend, finish
from dtfm.coordinator.core.messages import assignments
from dtfm.coordinator.core.safekeeping import snapshot, standby
from dtfm.coordinator.core.safekeeping.availability import Kind, ResumePoint, availability
from dtfm.coordinator.core.state import ATTEMPTS, Gathering, Pausing, PlanChosen, State, States, Switching
from dtfm.coordinator.core.transition import AnswerPlanNow, Transition
from dtfm.coordinator.core.trust.givers import givers, only_givers
from dtfm.coordinator.core.trust.standing import is_alone, party_of, weakest
from dtfm.coordinator.core.trust.verdict import (
    Against,
    OfTheRun,
    Unsettled,
    blame,
    blame_for_waiting,
    named_twice,
    times_suspected,
)
from dtfm.coordinator.core.validation.refusal import name_some, shorten
from dtfm.coordinator.core.validation.votes import check_lost
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import control_pb2 as wire

BELIEVED = 2
"""So many nodes that say that a checkpoint is damaged are believed."""


def regroup(transition: Transition, reason: str) -> None:
    """Nothing trains any more. Replanning decides how to go on."""
    phase = transition.state.phase
    waiting = phase.waiting if isinstance(phase, Gathering) else None  # another loss does not make waiting longer
    transition.enter(Gathering(transition.now, reason, waiting=waiting))
    planner = transition.state.planner
    if planner.asked is not None:  # it was asked about a cluster that is no more
        answer(transition, planner.asked.tickets, False, reason)
    transition.set_planner(replace(planner, asked=None, chosen=None))


def adopt(transition: Transition, choice: PlanChosen, cause: str) -> None:
    """Gives the plan the next generation and sends it to everybody. If no node holds some stage's state any more, training goes
    back to the newest snapshot, or to the start."""
    ledger = transition.state.ledger
    if ledger.training.step >= transition.state.run.train.steps and ledger.training.step in ledger.copies.checkpoints:
        finish(
            transition,
            f"all {ledger.training.step} steps are trained; the checkpoint is {ledger.copies.checkpoints[ledger.training.step]}",
        )
        return
    before = ledger.training.step
    if not ledger.state_is_held:
        standby.promote(transition)
    if (
        not transition.state.ledger.state_is_held
        and (newest := _newest_snapshot(transition.state)).step < ledger.training.step
    ):
        _roll_back(transition, newest, "no node holds all of the state as of the last step any more")
    ledger = transition.state.ledger
    reason = shorten(f"{cause}: {choice.reason}" if cause else choice.reason)
    plan = replace(choice.plan, generation=ledger.training.generation + 1)
    transition.emit(
        ev.PlanAdopted(
            plan.generation,
            plan,
            reason,
            ledger.training.step,
            choice.predicted_seconds,
            choice.lower_bound_seconds,
            counts_from(transition.state, plan.generation),
        )
    )
    planner = transition.state.planner
    if planner.asked is not None:
        answer(transition, planner.asked.tickets, False, "the plan has just changed")
    transition.set_planner(replace(planner, asked=None, chosen=None, has_planned=True))
    for step in transition.state.evaluations:
        transition.log(f"no held-out loss after step {step}: the plan changes before it is there, or is audited")
    transition.state = replace(transition.state, evaluations={})
    known = _what_holders_told(transition.state) if ledger.training.step == before else {}
    ledger, deadline = transition.state.ledger, transition.now + transition.state.patience
    named = givers(ledger, ledger.ready)
    transition.enter(Switching(frozenset(plan.nodes), deadline, states=known, givers=named))
    for node, message in assignments(ledger, reason, ledger.ready, named, snapshot.source(transition.state)):
        transition.send([node], wire.CoordinatorMessage(assignment=message))


def again(transition: Transition, reason: str) -> None:
    """Adopts the same plan under the next generation."""
    plan = transition.state.ledger.training.plan
    assert plan is not None
    adopt(transition, PlanChosen(plan, "the same plan again"), reason)


def plan_failed(
    transition: Transition,
    node: str,
    generation: int,
    problem: str,
    snapshot_damaged: bool = False,
    lost: Sequence[int] = (),
) -> None:
    """A node could not take its part, or has not what it should give others. ``snapshot_damaged`` and ``lost``: as in the
    event."""
    ledger, phase = transition.state.ledger, transition.state.phase
    if not isinstance(phase, Switching) or generation != ledger.training.generation:
        return
    if not _is_due(ledger, node, lost):
        transition.log(f"ignored that {node} cannot take its part in plan {generation}: it has none")
        return
    problems = {node: shorten(problem)}
    if lost:
        check_lost(lost, len(ledger.training.held))
        session = transition.state.members.sessions[node]
        transition.set_session(replace(session, standby=None))  # its copy may be what was lost
    if snapshot_damaged and snapshot.source(transition.state).folder:
        phase = replace(phase, damaged={**phase.damaged, **problems})
        transition.enter(phase)
        if len(phase.damaged) < BELIEVED and phase.awaiting - phase.damaged.keys():
            return  # others read it too: whoever is the first to say so is not alone
        problems = dict(phase.damaged)
    alone = () if lost or snapshot_damaged or is_alone(ledger) else only_givers(ledger, phase.givers, [node])
    suspects = tuple(sorted({node, *alone})) if alone else ()
    for who, why in problems.items():
        its_loss = tuple(lost) if who == node else ()
        transition.emit(ev.PlanFailed(generation, who, why, snapshot_damaged, its_loss, suspects=suspects))
    if suspects:
        _settle_between(transition, problems[node])
    else:
        _settle_failure(transition, node, problems[node])
    if not transition.state.stopped:
        regroup(transition, f"{node} could not take its part")


def overdue(transition: Transition, phase: Switching) -> None:
    """Nodes have not become ready for the plan in time, though heartbeats came. After ATTEMPTS in a row, it is settled against
    one that was waited for each time, undecided: what it waits for itself may come slowly from others."""
    ledger = transition.state.ledger
    suspects = phase.awaiting | only_givers(ledger, phase.givers, phase.awaiting)
    accused = weakest(ledger, suspects)
    problem = (
        f"{name_some(phase.awaiting)} not ready within {transition.state.patience:g} seconds, though heartbeats came"
    )
    transition.emit(
        ev.PlanFailed(ledger.training.generation, accused, problem, silent=True, suspects=tuple(sorted(suspects)))
    )
    match blame_for_waiting(transition.state.ledger):
        case Against() as verdict:
            times = times_suspected(transition.state.ledger, verdict.members[0])
            reason = f"{times} attempts waited for it; the last: {problem}"
            quarantine(transition, replace(verdict, undecided=True), Charge.STALLED, reason)
    regroup(transition, problem)


def back_before(transition: Transition, step: int, reason: str) -> None:
    """Training goes back to the newest snapshot of a step before ``step``, or to the start."""
    if transition.state.ledger.training.step:
        _roll_back(transition, newest_before(transition.state, step), reason)


def newest_before(state: State, step: int) -> ResumePoint:
    """The newest snapshot of a step before ``step``, or the start. Of checkpoints, only the last that the run keeps are there."""
    ledger = state.ledger
    on_disks = (
        ledger.copies.on_disks if ledger.copies.on_disks is not None and ledger.copies.on_disks.step < step else None
    )
    there = sorted(ledger.copies.checkpoints)[-state.run.checkpoint.keep :]
    checkpoints = {number: ledger.copies.checkpoints[number] for number in there if number < step}
    copies = replace(ledger.copies, on_disks=on_disks, checkpoints=checkpoints)
    return _newest_snapshot(replace(state, ledger=replace(ledger, copies=copies)))


def answer(transition: Transition, tickets: Sequence[int], changed: bool, reason: str) -> None:
    """Answers those who asked for a new plan. A change comes under the next generation, with the next commit."""
    generation = transition.state.ledger.training.generation + changed
    transition.commands.extend(AnswerPlanNow(ticket, changed, generation, reason) for ticket in tickets)


def _settle_between(transition: Transition, problem: str) -> None:
    """After ATTEMPTS in a row that failed at a node to which one party alone could give its state, it is settled against one of
    them, undecided. If that party goes, what it alone had is lost: see `adopt`."""
    match blame_for_waiting(transition.state.ledger):
        case Against() as verdict:
            reason = f"{ATTEMPTS} plans in a row could not start because of it, or of whom it had to do with; the last: {problem}"
            quarantine(transition, replace(verdict, undecided=True), Charge.PLAN_FAILED, reason)


def _settle_failure(transition: Transition, node: str, problem: str) -> None:
    """After ATTEMPTS in a row it is settled against a node. If others cannot take their part either, the last attempt goes
    without the state that nodes hold: at once if there is a snapshot, else before the run fails. Not for two strangers, who could
    send training back for ever."""
    ledger, newest = transition.state.ledger, _newest_snapshot(transition.state)
    said = ledger.trust.plan_failures
    held = ledger.training.step > 0 and ledger.state_is_held
    without = "the nodes could not take up the state that they hold; the last attempt goes without it"
    reason = f"{ATTEMPTS} plans in a row could not start; the last because of {node}: {problem}"
    match blame(ledger, said):
        case OfTheRun() if held and not ledger.is_open and not is_alone(ledger):
            _roll_back(transition, newest, without)
        case OfTheRun():
            fail_or_suspend(transition, named_twice(ledger, said) or (node,), Charge.PLAN_FAILED, reason)
        case Against() as verdict:
            reason = f"{ATTEMPTS} plans in a row could not start because of it alone; the last: {problem}"
            quarantine(transition, verdict, Charge.PLAN_FAILED, reason)
        case Unsettled():
            several = is_alone(ledger) or (len(set(map(party_of(ledger), said))) > 1 and not ledger.is_open)
            if several and len(said) >= ATTEMPTS - 1 and newest.step and held:
                _roll_back(transition, newest, without)


def _is_due(ledger: Ledger, node: str, lost: Sequence[int]) -> bool:
    """Whether the node has a part in the plan, or is said to have what it has lost."""
    assert ledger.training.plan is not None
    held = {layer for layer, holders in enumerate(ledger.training.held) if any(holder == node for holder, _ in holders)}
    return node in ledger.training.plan.nodes or bool(held.intersection(lost))


def _what_holders_told(state: State) -> States:
    """Of the state after the last committed step: what they said in the phase that ends."""
    if not isinstance(state.phase, Pausing | Switching):
        return {}
    holders = {node for layer in state.ledger.holders for node in layer}
    return {node: told for node, told in state.phase.states.items() if node in holders}


def _newest_snapshot(state: State) -> ResumePoint:
    return replace(availability(state), memory=()).resume_point()


def _roll_back(transition: Transition, point: ResumePoint, reason: str) -> None:
    ledger = transition.state.ledger
    origin = "the disks' snapshot" if point.kind is Kind.DISK else "the checkpoint"
    origin = f"from {origin} of step {point.step}" if point.step else "from the start"
    sentence = f"{reason}; {ledger.training.step - point.step} steps are trained again {origin}"
    transition.emit(
        ev.RolledBack(point.step, ledger.training.step, ledger.copies.checkpoints.get(point.step, ""), sentence)
    )
    snapshot.rolled_back(transition)

"""From nodes that are ready to a plan that trains: asking the planner, adopting, waiting for state, beginning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dtfm.coordinator.core import snapshot, standby
from dtfm.coordinator.core.ending import fail, finish
from dtfm.coordinator.core.messages import assignments
from dtfm.coordinator.core.planner_input import bytes_ratio, measured_cluster
from dtfm.coordinator.core.returning import Return, worth_waiting
from dtfm.coordinator.core.state import (
    ATTEMPTS,
    GRACE_LEASES,
    HASTE_LEASES,
    LAST_WORD_LEASES,
    PLANNING_LEASES,
    Gathering,
    PlanAsked,
    PlanChosen,
    State,
    Stepping,
    Switching,
)
from dtfm.coordinator.core.transition import AnswerPlanNow, Planned, PlanWanted, Turn
from dtfm.coordinator.core.validation import check_lost, shorten
from dtfm.coordinator.log import events as ev
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.replan.failover import rerouted


def regroup(turn: Turn, reason: str) -> None:
    """Nothing trains any more; plan anew over the nodes that are ready."""
    planning = turn.state.planning
    if planning is not None:  # what it was told is out of date
        planning = replace(planning, ready=frozenset())
    phase = turn.state.phase
    waiting = phase.waiting if isinstance(phase, Gathering) else None  # one more loss makes that no longer
    turn.set(phase=Gathering(turn.now, reason, waiting=waiting), chosen=None, planning=planning)
    consider(turn)


def consider(turn: Turn, ticket: int | None = None) -> None:
    """Asks the planner if there is cause to: nothing trains, a ready node has no part in the plan, or somebody asks."""
    state = turn.state
    phase = state.phase
    ready = frozenset(state.staying)
    tickets = () if ticket is None else (ticket,)
    if isinstance(phase, Gathering):
        if problem := _too_few(turn, phase):
            _wait(turn, phase, problem)
            answer(turn, tickets, False, problem)
            return
        if (awaited := worth_waiting(state, phase, turn.now)) is not None:
            problem = _await_return(turn, phase, awaited)
            answer(turn, tickets, False, problem)
            return
        if turn.now < phase.since + LAST_WORD_LEASES * state.lease and standby.last_words_due(state):
            answer(turn, tickets, False, "nodes that copied state of a lost one have still to say how far they came")
            return
        if (plan := _carried_on(turn)) is not None:
            answer(turn, tickets, False, "the plan has just changed")
            turn.set(considered=frozenset())  # a better one is looked for once it trains
            adopt(turn, PlanChosen(plan, "the same stages without who is gone"), phase.reason)
            return
        if phase.said and state.considered == ready and not tickets:
            return  # the planner found no plan for these
        if state.planning and state.planning.ready == ready:
            turn.set(planning=replace(state.planning, tickets=state.planning.tickets + tickets))
            return
    elif not isinstance(phase, Stepping) or state.planning or (state.chosen and not standby.awaited(state)):
        answer(turn, tickets, False, "a change of plan is under way already")
        return
    elif not ready:
        turn.set(saving=True)
        answer(turn, tickets, False, "every node wants to leave")
        return
    elif ticket is None and ready <= state.considered and (state.saving or not state.leaver_at_work):
        return
    _ask(turn, ready, tickets)


def planned(turn: Turn, result: Planned) -> None:
    """The planner's answer. One that was overtaken by a newer question is dropped."""
    asked, phase, outcome = turn.state.planning, turn.state.phase, result.outcome
    if asked is None or asked.number != result.number:
        return
    if not asked.ready <= set(turn.state.staying):
        turn.set(planning=None)
        answer(turn, asked.tickets, False, "a node left meanwhile")
        consider(turn)
        return
    if asked.hasty and isinstance(phase, Gathering) and isinstance(outcome, str) and not result.hopeless:
        _ask(turn, asked.ready, (), thorough=True)
        return
    turn.set(planning=None, considered=frozenset() if asked.hasty else asked.ready)
    current = turn.state.ledger.plan
    if isinstance(outcome, str):
        answer(turn, asked.tickets, False, outcome)
        if isinstance(phase, Gathering) and result.hopeless:
            fail(turn, f"no plan is possible: {outcome}")
        elif isinstance(phase, Gathering):
            _wait(turn, phase, outcome)
        elif turn.state.leaver_at_work:
            turn.set(saving=True)
    elif isinstance(phase, Gathering):
        answer(turn, asked.tickets, True, outcome.reason)
        adopt(turn, outcome, phase.reason)
    elif current is not None and _same_work(outcome.plan, current):
        answer(turn, asked.tickets, False, f"the plan stays as it is: {outcome.reason}")
        turn.set(chosen=None)
        standby.keep_up(turn)
    elif isinstance(phase, Stepping):
        answer(turn, asked.tickets, True, outcome.reason)
        turn.set(chosen=outcome)
        standby.keep_up(turn)
    else:
        answer(turn, asked.tickets, False, "the plan changed meanwhile")


def adopt(turn: Turn, choice: PlanChosen, cause: str, *, afresh: bool = False) -> None:
    """The plan gets the next generation and goes out to everybody. Where some stage's state is held by no node any more,
    training goes back to the newest backup or checkpoint, or to the start. ``afresh``: nothing that was done of the next step
    counts."""
    ledger = turn.state.ledger
    if ledger.step >= turn.state.run.train.steps and ledger.step in ledger.checkpoints:
        finish(turn, f"all {ledger.step} steps are trained; the checkpoint is {ledger.checkpoints[ledger.step]}")
        return
    if not ledger.state_is_held:
        standby.count_copies(turn)
    ledger = turn.state.ledger
    there = ledger.step in ledger.checkpoints or snapshot.restorable(turn.state, ledger.step)
    if not ledger.state_is_held and not there:
        _roll_back(turn, "no node holds all of the state as of the last step any more")
        afresh = True
    ledger = turn.state.ledger
    reason = shorten(f"{cause}: {choice.reason}" if cause else choice.reason)
    plan = replace(choice.plan, generation=ledger.generation + 1)
    turn.emit(
        ev.PlanAdopted(
            plan.generation,
            plan,
            reason,
            ledger.step,
            choice.predicted_seconds,
            choice.lower_bound_seconds,
            plan.generation if afresh else ledger.counts_from,
        )
    )
    if turn.state.planning is not None:
        answer(turn, turn.state.planning.tickets, False, "the plan has just changed")
    if turn.state.chosen not in (None, choice):
        turn.set(considered=frozenset())  # what was chosen is dropped: whom it was for is planned with again
    turn.set(
        phase=Switching(frozenset(plan.nodes), turn.now + turn.state.patience),
        chosen=None,
        planning=None,
        gathered=True,
        saving=False,
        evaluations={},
    )
    parts = snapshot.backup_parts(turn.state) if snapshot.restorable(turn.state, turn.state.ledger.step) else ()
    for node, message in assignments(turn.state.ledger, reason, turn.state.ready, parts):
        turn.send([node], assignment=message)


def again(turn: Turn, reason: str, *, afresh: bool = False) -> None:
    """The same plan under the next generation; ``afresh`` as in adopt."""
    plan = turn.state.ledger.plan
    assert plan is not None
    adopt(turn, PlanChosen(plan, "the same plan again"), reason, afresh=afresh)


def plan_failed(
    turn: Turn, node: str, generation: int, problem: str, backup: bool = False, lost: Sequence[int] = ()
) -> None:
    """A node could not take its part; after some attempts in a row the run fails. ``backup`` and ``lost`` as in the event."""
    if not isinstance(turn.state.phase, Switching) or generation != turn.state.ledger.generation:
        return
    problem = shorten(problem)
    if lost:
        check_lost(lost, len(turn.state.ledger.held))
        turn.update(turn.state.sessions[node], copying=None)  # if that is what it was to have
    turn.emit(ev.PlanFailed(generation, node, problem, backup, tuple(lost)))
    if turn.state.ledger.plan_failures >= ATTEMPTS:
        fail(turn, f"{ATTEMPTS} plans in a row could not start; the last because of {node}: {problem}")
    else:
        if (
            turn.state.ledger.plan_failures == ATTEMPTS - 1
            and _stored_step(turn.state)
            and turn.state.ledger.state_is_held
        ):
            _roll_back(
                turn, "the nodes could not take up what they hold of the last step; the last attempt goes without it"
            )
        regroup(turn, f"{node} could not take its part")


def answer(turn: Turn, tickets: tuple[int, ...], changed: bool, reason: str) -> None:
    """To those who asked to plan now; a change comes under the next generation, at the next commit."""
    generation = turn.state.ledger.generation + changed
    turn.commands.extend(AnswerPlanNow(ticket, changed, generation, reason) for ticket in tickets)


def _carried_on(turn: Turn) -> Plan | None:
    """The plan that trained until now, without those of its nodes that are gone; None where that is not possible."""
    state = turn.state
    plan, described = state.ledger.plan, state.ledger.described
    if plan is None or described is None or not state.gathered or state.ledger.plan_failures == ATTEMPTS - 1:
        return None  # the last attempt is with a plan of another making
    present = [node for node in state.ready if node in plan.nodes or node in state.staying]
    if not present:
        return None
    holders = [set(layer) for layer in state.ledger.holders] or [set[str]() for _ in described.workload.layers]
    for node, layers in standby.copies(state):
        for layer in range(*layers):
            holders[layer].add(node)
    return rerouted(
        plan, Problem(measured_cluster(state.ledger, present, bytes_ratio(state.run)), described.workload), holders
    )


def _too_few(turn: Turn, phase: Gathering) -> str:
    """Why planning makes no sense yet; empty: it does."""
    state = turn.state
    cluster, ready = state.run.cluster, len(state.staying)
    pinned = cluster.pinned
    least = len(pinned) if isinstance(pinned, tuple) else pinned or 1
    waited = bool(state.ledger.generation) and turn.now - phase.since >= GRACE_LEASES * state.lease
    if not state.gathered and not waited:
        least = cluster.nodes
    return f"{ready} of {least} nodes are ready" if ready < least else ""


def _await_return(turn: Turn, phase: Gathering, awaited: Return) -> str:
    """Waits for them; returns the sentence that says so."""
    phase = replace(phase, waiting=turn.now if phase.waiting is None else phase.waiting)
    assert phase.waiting is not None
    problem = (
        f"up to {awaited.until - phase.waiting:.3g} seconds for {', '.join(awaited.nodes)} to come back, who may still have the "
        f"state as of step {awaited.step}; without, training goes back to step {awaited.otherwise}"
    )
    turn.set(phase=phase, considered=frozenset())  # once that is over, they are to be planned with
    _wait(turn, phase, problem)
    return problem


def _wait(turn: Turn, phase: Gathering, problem: str) -> None:
    if phase.said != problem:
        turn.emit(ev.Waiting(f"{phase.reason}: {problem}" if phase.reason else problem))
        turn.set(phase=replace(phase, said=problem))
    turn.set(planning=None)


def _ask(turn: Turn, ready: frozenset[str], tickets: tuple[int, ...], thorough: bool = False) -> None:
    """``thorough``: even if nothing trains. Else those who could train on would wait for the planner: the first good plan is
    taken then, and a better one looked for once it trains."""
    state = turn.state
    hasty = isinstance(state.phase, Gathering) and state.ledger.plan is not None and not thorough
    described = state.ledger.described
    assert described is not None
    old = state.planning.tickets if state.planning else ()
    asked = PlanAsked(state.asked + 1, ready, old + tickets, hasty)
    turn.set(asked=asked.number, planning=asked)
    pinned = state.run.cluster.pinned
    if isinstance(pinned, tuple) and sum(pinned) > len(ready):
        pinned = len(pinned)  # the pinned replicas are not all there: keep training with the same number of stages
    turn.commands.append(
        PlanWanted(
            number=asked.number,
            cluster=measured_cluster(state.ledger, sorted(ready), bytes_ratio(state.run)),
            workload=described.workload,
            incumbent=state.ledger.plan,
            stages=pinned,
            seed=state.run.seed,
            generation=state.ledger.generation + 1,
            seconds=state.lease * (HASTE_LEASES if hasty else PLANNING_LEASES),
        )
    )


def _stored_step(state: State) -> int:
    """Step of the newest checkpoint or backup that can be gone back to; 0: there is none."""
    return max(state.ledger.checkpoint_step, snapshot.restorable_step(state))


def _roll_back(turn: Turn, reason: str) -> None:
    ledger, step = turn.state.ledger, _stored_step(turn.state)
    origin = "the nodes' own backup" if step == snapshot.restorable_step(turn.state) else "the checkpoint"
    again = "from the start" if step == 0 else f"from {origin} of step {step}"
    sentence = f"{reason}; {ledger.step - step} steps are trained again {again}"
    turn.emit(ev.RolledBack(step, ledger.step, ledger.checkpoints.get(step, ""), sentence))
    snapshot.rolled_back(turn)
    # Those of later steps would be of another past.
    turn.set(checkpoints={s: tally for s, tally in turn.state.checkpoints.items() if s <= step})


def _same_work(one: Plan, other: Plan) -> bool:
    return (one.stages, one.routes) == (other.stages, other.routes)

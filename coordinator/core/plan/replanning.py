"""When to plan again: `decide` is pure and gives its reason, `replan` carries it out, `planned` takes the planner's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtfm.coordinator.core.copies import keeping_up, standby
from dtfm.coordinator.core.copies.lost_state import awaited
from dtfm.coordinator.core.ending import fail
from dtfm.coordinator.core.phases import Gathering, Stepping
from dtfm.coordinator.core.plan import precision
from dtfm.coordinator.core.plan.adoption import adopt, rounds_of
from dtfm.coordinator.core.plan.asking import ask, question_of, round_lengths
from dtfm.coordinator.core.plan.beginning_islands import steps_left
from dtfm.coordinator.core.plan.steep_start import steep_start
from dtfm.coordinator.core.plan.waiting import Wait, WaitReason, begin_waiting, too_few
from dtfm.coordinator.core.refusal import shorten
from dtfm.coordinator.core.state.planner import Answer, PlanChosen, Question
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.timeouts import IDLE_AGAIN_LEASES, LAST_REPORT_LEASES
from dtfm.coordinator.core.transition import Planned, Transition
from dtfm.coordinator.log import events as ev
from dtfm.scheduler.model.plan import Plan


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the planner. ``hasty``: the run stands still, and goes on with the first good plan. If possible that is the last plan,
    without its lost nodes."""

    question: Question
    hasty: bool


@dataclass(frozen=True, slots=True)
class Adopt:
    choice: PlanChosen
    cause: str


Decision = Wait | Ask | Adopt


def decide(state: State, now: float, *, asked_for: bool = False) -> Decision:
    """What to do about the plan. ``asked_for``: an operator wants the planner to look, even if nothing has changed."""
    match state.phase:
        case Gathering() as phase:
            return _decide_to_begin(state, phase, now, asked_for)
        case Stepping():
            return _decide_to_change(state, now, asked_for)
        case _:
            return Wait(WaitReason.SWITCHING, "a change of plan is under way already")


def replan(transition: Transition, tickets: Sequence[int] = ()) -> None:
    """Carries out the decision of `decide`. ``tickets``: callers that wait for an answer."""
    decision, phase = decide(transition.state, transition.now, asked_for=bool(tickets)), transition.state.phase
    match decision:
        case Wait(WaitReason.PLANNING) if isinstance(phase, Gathering):
            if (asked := transition.state.planner.asked) is not None and tickets:
                asked = replace(asked, tickets=(*asked.tickets, *tickets))
                transition.set_planner(replace(transition.state.planner, asked=asked))
        case Wait(reason, sentence):
            transition.answer(tickets, False, sentence)
            if isinstance(phase, Gathering) and reason is not WaitReason.STANDBYS_MAY_REPORT:
                begin_waiting(transition, phase, reason, sentence)
        case Ask(question, hasty):
            ask(transition, question, hasty, tickets)
        case Adopt(choice, cause):
            transition.answer(tickets, False, "the plan has just changed")
            adopt(transition, choice, cause)


def planned(transition: Transition, result: Planned) -> None:
    """Takes the planner's answer, if it is to the last question. `replan` acts on it."""
    state, planner, outcome = transition.state, transition.state.planner, result.outcome
    asked = planner.asked
    if asked is None or asked.number != result.number:
        return
    if not _is_still_here(state, asked.question, None if isinstance(outcome, str) else outcome.plan):
        transition.end_question(planner, False, "a node left meanwhile")
        return
    if isinstance(outcome, str):
        if result.hopeless and isinstance(state.phase, Gathering) and _is_certain(state):
            fail(transition, f"no plan is possible: {outcome}")
        elif asked.hasty and not result.hopeless:
            transition.set_planner(replace(planner, answer=Answer(asked.question, True, None, outcome, transition.now)))
            ask(transition, asked.question, False, ())
        else:
            found = Answer(asked.question, False, None, outcome, transition.now)
            transition.end_question(replace(planner, answer=found), False, outcome)
        return
    if isinstance(state.phase, Gathering) and (other := precision.of_plan(state, outcome.plan)) is not None:
        transition.end_question(planner, False, f"the run is to compute in {other.precision}")
        transition.find(other)
        return
    rounds = rounds_of(state, outcome, at_rest=not outcome.within_round)
    outcome = replace(outcome, plan=replace(outcome.plan, rounds=rounds))
    # A plan for within a round has the islands that there are: once it is adopted, the planner looks for better ones.
    found = Answer(asked.question, asked.hasty or outcome.within_round, outcome.plan, at=transition.now)
    training = state.ledger.training
    if training.corrected and outcome.predicted_seconds is not None:
        outcome = replace(outcome, reason=f"{outcome.reason} Speeds are as corrected after step {training.corrected}.")
    if (fall := steep_start(state)) is not None and not asked.hasty:
        outcome = replace(outcome, reason=f"{outcome.reason} {fall.narrate()}")
    if not isinstance(state.phase, Gathering | Stepping):
        transition.end_question(planner, False, "the plan changed meanwhile")
    elif isinstance(state.phase, Stepping) and _same_work(outcome.plan, training.plan):
        transition.end_question(replace(planner, answer=found, chosen=None), False, outcome.reason)
        if (seconds := outcome.predicted_seconds) not in (None, training.predicted):
            bound, reason = outcome.lower_bound_seconds, shorten(outcome.reason)
            transition.emit(ev.PlanRepriced(training.generation, seconds, bound, training.overhead, reason))
    else:
        transition.end_question(replace(planner, answer=found, chosen=outcome), True, outcome.reason)


def _is_certain(state: State) -> bool:
    """Whether it is certain what the run trains. If not, the node that described the run may have made planning impossible. The
    word of strangers is never certain: the run waits, and says why."""
    ledger, trust = state.ledger, state.run.trust
    return not ledger.is_open and (ledger.data_confirmed or bool(trust.data and trust.workload) or ledger.is_alone)


def drop_stale_choice(transition: Transition) -> None:
    """Drops a chosen plan if one of its nodes has left or wants to leave."""
    chosen = transition.state.planner.chosen
    if chosen is not None and not set(chosen.plan.nodes) <= set(transition.state.ledger.staying):
        transition.set_planner(replace(transition.state.planner, chosen=None))


def switch_is_due(state: State) -> bool:
    """Whether a plan is chosen and its nodes have copied the state they lack, so that the next pause may adopt it. Within a round
    they have the weights of the last exchange."""
    return state.planner.chosen is not None and not standby.still_copying(state)


def leaver_is_stuck(state: State) -> bool:
    """Whether a node of the plan wants to leave and no plan is possible without it: then the next commit ends in a checkpoint."""
    if not set(state.ledger.leaving) & set(state.ledger.training.in_force.nodes):
        return False
    found, question = state.planner.answer, question_of(state)
    no_plan = found is not None and found.question == question and found.plan is None and not found.hasty
    return no_plan or not question.nodes


def _decide_to_begin(state: State, phase: Gathering, now: float, asked_for: bool) -> Decision:
    planner, hold = state.planner, state.ledger.hold
    if hold is not None and not hold.ends:
        return Wait(WaitReason.PAUSED, hold.narrate())
    if problem := too_few(state, phase, now):
        return Wait(WaitReason.TOO_FEW_NODES, problem)
    waits = awaited(state, phase, now)
    if waits is not None and not waits.asks:
        return Wait(WaitReason.NODES_MAY_RETURN, waits.sentence)
    if now < phase.since + LAST_REPORT_LEASES * state.lease and keeping_up.last_reports_awaited(state):
        return Wait(WaitReason.STANDBYS_MAY_REPORT, "standbys of lost state have not yet said how far they came")
    if waits is not None:
        return Wait(WaitReason.STATE_IS_LOST, waits.sentence)
    question = question_of(state)
    if planner.chosen is not None:
        return Adopt(planner.chosen, phase.reason)
    found = planner.answer if planner.answer and planner.answer.question == question else None
    # A measurement that changes in the meantime does not start the planner again: otherwise it would never finish. The planner
    # looks for a better plan when the run trains.
    if planner.asked is not None and planner.asked.question.nodes == question.nodes:
        return Wait(WaitReason.PLANNING, "the planner is at work")
    if found is not None and found.plan is None and not found.hasty and not asked_for:
        return Wait(WaitReason.NO_PLAN, found.problem)
    hasty = state.ledger.training.plan is not None and not (found is not None and found.hasty)
    return Ask(question, hasty)


def _decide_to_change(state: State, now: float, asked_for: bool) -> Decision:
    planner, question, chosen = state.planner, question_of(state), state.planner.chosen
    last = planner.asked or planner.answer
    # An island of newcomers is quickly found, and may begin within the round: it waits neither for a search for all islands, nor
    # for a plan that is adopted at the exchange.
    hurries = steps_left(state) > 0 and last is not None and bool(question.nodes - last.question.nodes)
    if planner.asked is not None and not hurries:
        return Wait(WaitReason.PLANNING, "the planner is at work already")
    if (chosen is not None and chosen.within_round) or (switch_is_due(state) and not hurries):
        return Wait(WaitReason.SWITCHING, "a change of plan is under way already")
    if not question.nodes:
        return Wait(WaitReason.EVERYBODY_LEAVES, "every node wants to leave")
    if not asked_for and _is_best(state, question, now):
        return Wait(WaitReason.PLAN_IS_BEST, "nothing has changed since the planner last looked")
    return Ask(question, hasty=False)


def _is_best(state: State, question: Question, now: float) -> bool:
    """Whether the planner has answered this question. An idle node that left does not change the answer. While a node is idle, no
    answer is final: the planner may have had too little time, or wrong speeds and prices."""
    found, chosen = state.planner.answer, state.planner.chosen
    if found is None or found.hasty:
        return False
    if (found.question.changes, found.question.disputes) != (question.changes, question.disputes):
        return False
    if found.question.steep and not question.steep:
        return False  # islands may begin now
    if now - found.at >= IDLE_AGAIN_LEASES * state.lease and _has_idle(state, question):
        return False
    if found.plan is None:
        return found.question == question
    target = chosen.plan if chosen is not None else state.ledger.training.plan
    return (
        question.nodes <= found.question.nodes
        and question.shown <= found.question.shown
        and _same_work(found.plan, target)
        and round(found.plan.rounds.length) in round_lengths(state, hasty=False)
        and set(found.plan.nodes) <= {node for node, _ in question.nodes}
    )


def _has_idle(state: State, question: Question) -> bool:
    """Whether a node that could train does not."""
    return not {node for node, _ in question.nodes} <= set(state.ledger.training.in_force.nodes)


def _is_still_here(state: State, question: Question, plan: Plan | None) -> bool:
    """Whether the plan's nodes are connected, and those in the question are the same processes. Without a plan: whether all nodes
    in the question are."""
    used = {node for node, _ in question.nodes} if plan is None else set(plan.nodes)
    asked_about = frozenset(process for process in question.nodes if process[0] in used)
    return used <= set(state.ledger.working) and asked_about <= question_of(state).nodes


def _same_work(one: Plan, other: Plan | None) -> bool:
    """Whether both plans do the same work. Rounds of one length are the same, whenever they begin, and whatever is owed."""
    if other is None or round(one.rounds.length) != round(other.rounds.length):
        return False
    mine, its = ((plan.stages, plan.flows, plan.takeovers, plan.rounds.restarts) for plan in (one, other))
    return mine == its

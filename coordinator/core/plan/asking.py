"""The question to the planner: which nodes, under which limits, and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from dtfm.coordinator.core.copies.availability import availability
from dtfm.coordinator.core.phases import Gathering, Stepping
from dtfm.coordinator.core.plan.adoption import is_length_of
from dtfm.coordinator.core.plan.beginning_islands import steps_left
from dtfm.coordinator.core.plan.drift import uncertainty
from dtfm.coordinator.core.plan.islands_cost import islands_cost
from dtfm.coordinator.core.plan.planner_input import horizon_seconds, measured_cluster
from dtfm.coordinator.core.plan.steep_start import steep_start
from dtfm.coordinator.core.state.planner import Asked, Question
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.timeouts import HASTE_LEASES, PLANNING_LEASES
from dtfm.coordinator.core.transition import CarryOn, PlanWanted, Transition
from dtfm.coordinator.core.trust.claims import shown_by
from dtfm.coordinator.core.trust.disputes import disputes, kept_apart
from dtfm.coordinator.core.validation.description import as_the_run_says
from dtfm.scheduler.model.rounds import lengths_within


def question_of(state: State) -> Question:
    """The question that the planner would be asked now."""
    members, staying = state.ledger.members, state.ledger.staying
    nodes = frozenset((node, members[node].incarnation) for node in staying)
    shown, fall = shown_by(state.ledger, staying), steep_start(state)
    steep = fall is not None and fall.is_steep
    return Question(nodes, state.ledger.reach.changes, shown, disputes(state.ledger), steep)


def _carry_on(state: State) -> CarryOn | None:
    """Asks whether the last plan can be carried on. None: it may not be carried on."""
    ledger = state.ledger
    plan, described = ledger.training.plan, ledger.described
    if plan is None or described is None or not state.planner.has_planned:
        return None
    if any(each.failures > 1 for node, each in ledger.health.items() if node in plan.nodes):
        return None  # a plan whose node failed twice is not carried on
    whole, several = {*ledger.whole_islands, None}, len({*ledger.training.islands.values()}) > 1
    gone = {node for node in plan.nodes if ledger.source_of(node) not in whole} if several else set[str]()
    heard = {node: session.heard for node, session in state.members.sessions.items()}
    present = sorted(
        (node for node in ledger.working if node in {*ledger.staying, *plan.nodes} - gone),
        key=lambda node: -heard.get(node, 0.0),  # the later a node was heard, the likelier it is still there
    )
    holders = availability(state).in_memory(ledger.training.step)
    nobody = tuple(frozenset[str]() for _ in described.workload.layers)
    if not present:
        return None
    return CarryOn(partial(measured_cluster, ledger, present), holders or nobody)


def ask(transition: Transition, question: Question, hasty: bool, tickets: Sequence[int]) -> None:
    state, planner = transition.state, transition.state.planner
    waiting = planner.asked.tickets if planner.asked else ()
    asked = Asked(planner.number + 1, question, hasty, (*waiting, *tickets))
    transition.set_planner(replace(planner, number=asked.number, asked=asked))
    ledger, training, steps = state.ledger, state.ledger.training, state.last_step
    nodes = sorted(node for node, _ in question.nodes)
    pinned = state.run.cluster.pinned
    whole, described = ledger.whole_islands, ledger.description  # whole_islands looks at every member
    apart = any({one, other} <= set(nodes) for one, other in kept_apart(ledger))
    if isinstance(pinned, tuple) and (sum(pinned) > len(nodes) or apart):
        pinned = len(pinned)  # some of the replicas are missing or kept apart: train with the same number of stages
    workload = replace(as_the_run_says(described.workload, state.run), tied=described.is_tied)
    transition.commands.append(
        PlanWanted(
            number=asked.number,
            cluster=partial(measured_cluster, ledger, nodes),
            workload=replace(workload, islands_cost=islands_cost(state, workload)),
            incumbent=training.plan,
            stages=pinned,
            seed=state.run.seed,
            generation=training.generation + 1,
            overhead=training.overhead,
            horizon=horizon_seconds(training.losses, training.step, steps - training.step, training.step_seconds),
            seconds=state.lease * (HASTE_LEASES if hasty else PLANNING_LEASES),
            carry_on=_carry_on(state) if isinstance(state.phase, Gathering) else None,
            lengths=round_lengths(state, hasty=hasty),
            islands={
                node: number
                for layer in training.held
                for node, _ in layer
                if (number := training.islands.get(node, 0)) in whole
            },
            uncertainty=uncertainty(state),
            steps_left=steps_left(state) if isinstance(state.phase, Stepping) else 0,
            batches=_batches(state),
        )
    )


def _batches(state: State) -> int | None:
    """The batches of a step under a layout with rounds. None: as many as there are islands. Within a round they stay."""
    if not (isinstance(state.phase, Stepping) or state.rounds.at_rest(state.ledger.training.step)):
        return state.rounds.batches_each
    return None if state.run.train.batch_grows else 1


def round_lengths(state: State, *, hasty: bool) -> tuple[int, ...]:
    """The lengths of a round that the planner may choose from; 0: no rounds."""
    run, step = state.run, state.ledger.training.step
    standing = round(state.rounds.length)
    if not (isinstance(state.phase, Stepping) or state.rounds.at_rest(step)):
        return (standing,)
    if not run.may_have_rounds:
        return (0,)
    if run.train.rounds != "auto":
        return (standing if is_length_of(state.rounds, run.train.rounds) else run.train.rounds,)
    if hasty:
        return (standing,)
    if (fall := steep_start(state)) is not None and fall.is_steep:
        return (0,)
    audited = run.trust.audits > 0
    others = (0, *lengths_within(run.train.steps - state.rounds.progress(step), audited=audited))
    return tuple(dict.fromkeys((standing, *others) if not standing or state.rounds.restarts == audited else others))

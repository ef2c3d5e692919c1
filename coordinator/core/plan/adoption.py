"""How a plan is adopted, fails to begin, and is given up.

Any phase -> Switching by `adopt`, or the run's end if nothing is left to do; any phase -> Gathering by `regroup`. When all
nodes are ready, step/beginning.py begins the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from dtfm.coordinator.core.copies import disks, frozen_layers, snapshot, standby
from dtfm.coordinator.core.copies.availability import Kind
from dtfm.coordinator.core.copies.lost_state import resume_point
from dtfm.coordinator.core.ending import conclude
from dtfm.coordinator.core.findings import Setback, Unwell
from dtfm.coordinator.core.givers import givers
from dtfm.coordinator.core.health.broken_pairs import may_lose
from dtfm.coordinator.core.messages import assignments
from dtfm.coordinator.core.phases import Gathering, Pausing, States, Switching
from dtfm.coordinator.core.plan.beginning_islands import moments_for
from dtfm.coordinator.core.plan.expected import loading_seconds
from dtfm.coordinator.core.plan.undoing import go_back
from dtfm.coordinator.core.refusal import name_some, shorten
from dtfm.coordinator.core.state.planner import PlanChosen
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.timeouts import BESIDE, READY_LEASES, STEP_FACTOR
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation.votes import check_lost
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.health import PLAN_FAILED
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.steps import OVERDUE, PEER_LOST, SETTLED
from dtfm.coordinator.log.unaudited import cannot_be_audited
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.owed import total
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.rounds import Rounds, spread

ENOUGH_TO_SAY_DAMAGED = 2
"""The number of nodes that must say that a checkpoint is damaged, where others read it too."""


def regroup(transition: Transition, reason: str) -> None:
    """Stops training. Replanning decides how to go on."""
    phase = transition.state.phase
    waiting = phase.waiting if isinstance(phase, Gathering) else None  # another loss does not make waiting longer
    transition.enter(Gathering(transition.now, reason, waiting=waiting))
    # The planner was asked about a cluster that no longer exists.
    transition.end_question(replace(transition.state.planner, chosen=None), False, reason)


def adopt(transition: Transition, choice: PlanChosen, cause: str) -> None:
    """Gives the plan the next generation and sends it to everybody. If no node holds some stage's state, training goes back to
    the newest snapshot, or to the start."""
    ledger, before = transition.state.ledger, transition.state.ledger.training.step
    if not ledger.state_is_held:
        standby.promote(transition)
    is_home = before in ledger.copies.checkpoints and not transition.state.ledger.state_is_held
    if transition.state.is_closing and (ledger.copies.is_safe(before) or is_home):
        conclude(transition)
        return
    if not transition.state.ledger.state_is_held:
        if (point := resume_point(transition.state, transition.now)) is None:
            regroup(transition, cause)
            return
        begins_there = point.kind is Kind.WEIGHTS and ledger.copies.from_weights != point.step
        if point.step < before or begins_there:
            go_back(transition, point, "no node holds all of the state as of the last step any more", in_doubt=False)
    ledger = transition.state.ledger
    generation, batches = ledger.training.generation + 1, ledger.training.batches(ledger.training.step)
    at_rest = transition.state.rounds.at_rest(ledger.training.step)
    plan, rounds = _with_fresh_numbers(choice.plan, ledger), rounds_of(transition.state, choice, at_rest=at_rest)
    debts, plan = ledger.training.debts, replace(plan, rounds=rounds)
    owed, moments = debts.under(plan, batches), {}
    if choice.with_moments and not at_rest:
        moments = moments_for(ledger, plan)
    plan = replace(plan, generation=generation, owed=owed, counted=debts.counted(plan, batches))
    reason = shorten(f"{cause}: {choice.reason}" if cause else choice.reason)
    if owed not in ledger.training.debts.adopted:
        reason += f"; {total(owed.again):,} micro-batches that lost islands had trained come again"
    former, before_it = ledger.training.plan, cannot_be_audited(ledger)
    transition.emit(
        ev.PlanAdopted(
            plan.generation,
            plan,
            reason,
            ledger.training.step,
            choice.predicted_seconds,
            choice.lower_bound_seconds,
            _counts_from(transition.state, plan),
            moments,
        )
    )
    if (now := cannot_be_audited(transition.state.ledger)) != before_it:
        transition.emit(ev.StagesUnaudited(generation, now))
    disks.look_for_room(transition, former)
    planner = replace(transition.state.planner, chosen=None, has_planned=True)
    transition.end_question(planner, False, "the plan has just changed")
    if (pending := transition.state.evaluation) is not None:
        transition.log(f"no held-out loss after step {pending.step}: the plan changes before it is there")
        transition.state = replace(transition.state, evaluation=None)
    known = _what_holders_told(transition.state) if ledger.training.step == before else {}
    ledger = transition.state.ledger
    longest = max((loading_seconds(transition.state, node) for node in plan.nodes), default=0.0)
    deadline = transition.now + READY_LEASES * transition.state.lease + BESIDE * STEP_FACTOR * longest
    named = givers(ledger, ledger.ready)
    transition.enter(Switching(frozenset(plan.nodes), deadline, transition.now, states=known, givers=named))
    source, frozen = snapshot.source(transition.state), [*frozen_layers.offered(transition.state)]
    for node, message in assignments(ledger, reason, ledger.ready, named, source, frozen):
        transition.send([node], message)


def _counts_from(state: State, plan: Plan) -> int:
    """The first generation whose work on the next step counts under ``plan``, which is about to be adopted.

    If work is audited, an interrupted step starts from its beginning, as tensors of two generations cannot be audited. A step
    whose deadline has passed may go on (`State.overdue`), because its progress shows which node it waits for.
    """
    training = state.ledger.training
    goes_on = not state.run.trust.audits or state.overdue == training.step + 1
    same_samples = plan.owed == training.debts.adopted[-1] and plan.rounds.batches_each == training.rounds.batches_each
    return training.counts_from if goes_on and same_samples else plan.generation


def _with_fresh_numbers(plan: Plan, ledger: Ledger) -> Plan:
    """The plan with a new number for each island that begins within a round: no island has had the number in this round.
    Otherwise training that was lost with an earlier island would count for it."""
    of_round = ledger.training.debts.of_round
    fresh = count(max({*of_round, *plan.places}) + 1)
    numbers = {island: next(fresh) for island in plan.places if island in of_round.keys() - ledger.whole_islands}
    stages = (replace(stage, island=numbers.get(stage.island, stage.island)) for stage in plan.stages)
    return replace(plan, stages=tuple(stages)) if numbers else plan


def rounds_of(state: State, choice: PlanChosen, *, at_rest: bool) -> Rounds:
    """The rounds in force. If the plan's rounds have another length, or other batches, or wrongly begin with moments: the rounds
    that begin now."""
    rounds, step, restarts = state.rounds, state.ledger.training.step, state.run.trust.audits > 0
    length = round(choice.plan.rounds.length) if choice.length is None else choice.length
    batches_each = max(1, choice.plan.micro_batches // state.run.train.micro_batches) if length else 1
    stays = rounds.restarts == (restarts and rounds.count > 0) and rounds.batches_each == batches_each
    if (stays or not at_rest) and (length == round(rounds.length) or is_length_of(rounds, length)):
        return rounds
    before, done = step - state.ledger.training.trained(step), rounds.progress(step)
    left = state.run.train.steps - done
    return spread(length, left, step, before, restarts=restarts, batches_each=batches_each, ahead=done - step)


def is_length_of(rounds: Rounds, length: int) -> bool:
    """Whether rounds of this length are spread like these rounds."""
    return spread(length, rounds.steps, restarts=rounds.restarts).count == rounds.count


def again(transition: Transition, reason: str) -> None:
    """The same plan under the next generation, or another plan if a node of it is not ready: it left, has just returned, or is
    out of use."""
    ledger = transition.state.ledger
    if (plan := ledger.training.plan) is not None and set(plan.nodes) <= set(ledger.working):
        adopt(transition, PlanChosen(plan, "the same plan again"), reason)
    else:
        regroup(transition, reason)


def plan_failed(transition: Transition, node: str, message: wire.PlanFailed) -> None:
    """A node could not take its part, or lacks state that it should give to others."""
    ledger, phase, lost = transition.state.ledger, transition.state.phase, tuple(message.lost)
    if not isinstance(phase, Switching) or message.generation != ledger.training.generation:
        return
    if not _is_due(ledger, node, lost):
        transition.log(f"ignored that {node} cannot take its part in plan {message.generation}: it has none")
        return
    if lost:
        check_lost(lost, len(ledger.training.held))
        session = transition.state.members.sessions[node]
        transition.set_session(replace(session, standby=None))  # its copy may be the state that was lost
    from_checkpoint = message.snapshot_damaged and bool(snapshot.source(transition.state).folder)
    why, damaged = shorten(message.problem), message.snapshot_damaged
    failure = ev.PlanFailed(message.generation, node, why, damaged, lost, from_checkpoint=from_checkpoint)
    if from_checkpoint:
        transition.set_phase(replace(phase, damaged={**phase.damaged, node: failure}))
        settle_damage(transition)
    elif lost:
        _fail(transition, [failure])
    elif may_lose(ledger, node, message.peer) or _gives(phase, node, message.peer):
        reason = f"{node} could not reach {message.peer} for plan {failure.generation}: {why}"
        _fail(transition, [failure], (Unwell(node, PEER_LOST, reason, message.peer),))
    else:
        _fail(transition, [failure], (_unwell(failure),))


def settle_damage(transition: Transition) -> None:
    """The plan fails if several nodes say that the checkpoint is damaged, or all nodes that are not ready. Others read the
    checkpoint too, so the first report need not stay alone."""
    phase = transition.state.phase
    assert isinstance(phase, Switching)
    if len(phase.damaged) >= ENOUGH_TO_SAY_DAMAGED or phase.awaiting <= phase.damaged.keys():
        failures = [*phase.damaged.values()]
        _fail(transition, failures, tuple(map(_unwell, failures)))


def _gives(phase: Switching, node: str, peer: str) -> bool:
    """Whether the peer was named to the node as a holder of state."""
    return any(peer in layer for layer in phase.givers.get(node, ()))


def _unwell(failure: ev.PlanFailed) -> Unwell:
    reason = f"{failure.node} could not take its part in plan {failure.generation}: {failure.reason}"
    return Unwell(failure.node, PLAN_FAILED, reason)


def _fail(transition: Transition, failures: Sequence[ev.PlanFailed], unwell: tuple[Unwell, ...] = ()) -> None:
    """The plan fails."""
    ledger, last = transition.state.ledger, failures[-1]
    for each in failures:
        transition.emit(each)
    if transition.state.ledger.copies is not ledger.copies:
        regroup(transition, f"{last.node} found the snapshot damaged")  # so say several
        return
    reason = unwell[-1].why if unwell else _unwell(last).why
    transition.find(Setback(SETTLED, last.node, reason, unwell=unwell, lost_state=True))


def plan_overdue(transition: Transition, phase: Switching) -> None:
    """Nodes have not become ready for the plan in time, though heartbeats came."""
    ledger, suspects = transition.state.ledger, tuple(sorted(phase.awaiting))
    problem = f"{name_some(phase.awaiting)} not ready within {phase.deadline - phase.since:.3g} seconds, though heartbeats came"
    transition.emit(ev.PlanFailed(ledger.training.generation, suspects[0], problem, silent=True))
    unwell = tuple(Unwell(node, OVERDUE, problem) for node in suspects)
    transition.find(Setback(OVERDUE, suspects[0], problem, unwell=unwell, lost_state=True))


def _is_due(ledger: Ledger, node: str, lost: Sequence[int]) -> bool:
    """Whether the node has a part in the plan, or is recorded as a holder of the state that it has lost."""
    held = {layer for layer, holders in enumerate(ledger.training.held) if any(holder == node for holder, _ in holders)}
    return node in ledger.training.in_force.nodes or bool(held.intersection(lost))


def _what_holders_told(state: State) -> States:
    """The reports of holders in the phase that ends, about the state after the last committed step."""
    if not isinstance(state.phase, Pausing | Switching):
        return {}
    holders = {node for layer in state.ledger.holders for node in layer}
    return {node: told for node, told in state.phase.states.items() if node in holders}

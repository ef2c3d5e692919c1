"""The audits of a step, from the draw to a conclusion: who is asked, and what is heard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from random import Random

from dtfm.coordinator.core.auditing import memory
from dtfm.coordinator.core.auditing.conclusion import Conclusion, Unaudited
from dtfm.coordinator.core.auditing.fetching import fetch_seconds
from dtfm.coordinator.core.auditing.judgement import judged, referees
from dtfm.coordinator.core.auditing.obstruction import charge_neighbours, obstruction
from dtfm.coordinator.core.auditing.order import needed, order_for, order_for_held_out
from dtfm.coordinator.core.auditing.views import View, views_of
from dtfm.coordinator.core.state import State, Stepping
from dtfm.coordinator.core.timeouts import AUDITORS_FRACTION, audit_patience
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.audits import COMPARED, Audit, Passed, Request
from dtfm.coordinator.core.trust.draw import cannot_be_audited, chance, draw, draw_held_out
from dtfm.coordinator.core.trust.passed import read_passed
from dtfm.coordinator.core.trust.standing import party_of
from dtfm.coordinator.core.validation.refusal import malformed, name_some
from dtfm.coordinator.log.standing import Standing, earned
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan


def passed_in(state: State, phase: Stepping, node: str, vote: wire.StepReady) -> Mapping[str, Passed]:
    """By node that has voted, this one included, what it says was passed on; empty if the step cannot be audited. Raises
    Refused."""
    plan, described = state.ledger.training.plan, state.ledger.described
    if not state.run.trust.audits or phase.resumed:
        return {}
    assert plan is not None
    assert described is not None
    trained = not phase.only_evaluation
    passed = read_passed(vote, plan, node, described.buckets, phase.held_out, trained=trained)
    return {**phase.passed, node: passed}


NEWCOMERS_WEIGHT = 5.0
"""Among strangers, this many times more work is audited of a node that is not proven. It may lie from its first step on."""


def drawn(transition: Transition, phase: Stepping) -> tuple[Audit, ...]:
    """What is done again of a step for which all have voted, and of an evaluation right before it: nobody is
    asked yet, see `conclude`."""
    state, plan = transition.state, transition.state.ledger.training.plan
    assert plan is not None
    if not phase.passed:
        return ()
    party = party_of(state.ledger)
    _say_what_cannot_be_audited(transition, plan, party)
    kept = {node for node, vote in phase.votes.items() if vote.kept}
    random = chance(state.secret, plan.generation, phase.step)
    if phase.only_evaluation:
        return _drawn_of_evaluation(state, phase, plan, random)
    found = draw(
        plan,
        state.run.trust.audits,
        random,
        party,
        kept,
        lambda node: _weight(state, node),
        broken=state.ledger.reach.broken,
    )
    audits = [Audit(order_for(state, phase, plan, each, random), (each.by,)) for each in found]
    memory.drawn_again(transition, {each.node for each in found})
    return *audits, *_drawn_of_evaluation(state, phase, plan, random)


def _drawn_of_evaluation(state: State, phase: Stepping, plan: Plan, random: Random) -> tuple[Audit, ...]:
    evaluation = state.evaluations.get(phase.step - 1)
    if not phase.held_out or evaluation is None or not evaluation.is_whole:
        return ()
    kept = {node for node, vote in phase.votes.items() if vote.kept_evaluation}
    found = draw_held_out(plan, phase.held_out, state.run.trust.audits, random, party_of(state.ledger), kept)
    return tuple(Audit(order_for_held_out(phase, plan, evaluation, each), (each.by,)) for each in found)


def heard(transition: Transition, node: str, answer: wire.Audited) -> None:
    """An auditor's answer. One that is not awaited is ignored."""
    phase = transition.state.phase
    audits = phase.audits if isinstance(phase, Stepping) else ()
    asked = [audit for audit in audits if node in audit.awaited and audit.awaited[node].number == answer.number]
    if not asked:
        _heard_late(transition, node, answer)
        return
    assert isinstance(phase, Stepping)
    audit = asked[0]
    around = needed(audit.order)
    _check(answer, around)
    _set_audit(transition, phase, audit, replace(audit, answers={**audit.answers, node: answer}))
    memory.answered(transition, node)
    of, party = audit.order.node, party_of(transition.state.ledger)
    if answer.withheld_by in ("", of) and not answer.problem and not audit.order.evaluation:
        memory.handed_out(transition, {each for each in around if party(each) != party(of)}, of)


def _heard_late(transition: Transition, node: str, answer: wire.Audited) -> None:
    """The node whose work was done again has left, or the answer is not due at all."""
    remembered = transition.state.auditing
    request = remembered.left.get(answer.number)
    if request is None or request.by != node:
        transition.log(f"ignored the answer of {node} to audit {answer.number}: it is not awaited")
        return
    left = {number: each for number, each in remembered.left.items() if number != answer.number}
    transition.state = replace(transition.state, auditing=replace(remembered, left=left))
    if answer.withheld_by == request.node:
        attempt = (request.generation, request.step)
        memory.withheld(transition, request.node, request.node, (node,), attempt, ended=True)
        transition.log(
            f"{request.node} left in step {request.step} when {node} came to something else and asked for its own"
        )


def conclude(transition: Transition) -> Conclusion | Unaudited | None:
    """Asks auditors, gives up on those that are overdue, and judges the audits that are answered. The phase has those that still
    wait."""
    _give_up_overdue(transition)
    if (found := obstruction(transition)) is not None:
        return found
    phase = transition.state.phase
    assert isinstance(phase, Stepping)
    for audit in phase.audits:
        if audit.answers.keys() >= set(audit.auditors):
            if more := referees(transition.state, audit):
                _set_audit(transition, phase, audit, replace(audit, auditors=(*audit.auditors, *more)))
            else:
                _set_audit(transition, phase, audit, None)
                charge_neighbours(transition, audit)
                match judged(transition, audit):
                    case Unaudited() as unaudited:
                        return obstruction(transition) or unaudited
                    case Conclusion() as concluded:
                        return concluded
            phase = transition.state.phase
            assert isinstance(phase, Stepping)
    if (found := obstruction(transition)) is not None:
        return found
    _ask(transition)
    return None


def interrupted(transition: Transition, phase: Stepping, ender: str = "", lost: str = "") -> None:
    """The step ends while audits are open. ``ender``: who has left, or says that it cannot do it, as it ``lost`` another.

    It has a strike if more parties have found work of its own party wrong or withheld than right. Nobody else has one: else a
    false auditor could end the step before others are asked. Nor does the word of the ``lost`` one count, which may have
    broken the stream itself."""
    party = party_of(transition.state.ledger)
    believed = {by for audit in phase.audits for by in audit.auditors if not lost or party(by) != party(lost)}
    for audit in phase.audits if ender else ():
        charge_neighbours(transition, audit, ender, believed)
        node, views = audit.order.node, views_of(transition.state, audit)
        against = [by for by, view in views.items() if by in believed and view in (View.WRONG, View.WITHHELD)]
        right = sum(view is View.RIGHT for view in views.values())
        if party(node) == party(ender) and len(set(map(party, against))) > right:
            memory.withheld(transition, node, node, against, (audit.order.generation, phase.step), ended=True)
    memory.put_off(transition, phase, ender, believed)


def _weight(state: State, node: str) -> float:
    party = party_of(state.ledger)
    if party(node) in {party(each) for each in state.auditing.due}:
        return 1 / state.run.trust.audits
    strange = state.ledger.is_open and earned(state.ledger, node).standing is not Standing.PROVEN
    return NEWCOMERS_WEIGHT if strange else 1.0


def _say_what_cannot_be_audited(transition: Transition, plan: Plan, party: Callable[[str], str]) -> None:
    layers = {plan.stages[index].layers for index in cannot_be_audited(plan, party)}
    remembered = transition.state.auditing
    for first, past_last in sorted(layers - remembered.cannot):
        transition.log(f"nobody else than one party has layers {first}-{past_last - 1}: their work cannot be audited")
    if layers != remembered.cannot:
        transition.state = replace(transition.state, auditing=replace(remembered, cannot=frozenset(layers)))


def _check(answer: wire.Audited, needed: Collection[str]) -> None:
    """Raises Refused."""
    for kind in COMPARED:
        error = getattr(answer, kind)
        if not (error == -1 or error >= 0):
            raise malformed(f"audited.{kind}", error, "-1, or 0 or more")
    if answer.withheld_by and answer.withheld_by not in needed:
        raise malformed(
            "audited.withheld_by",
            answer.withheld_by,
            "the node that is audited, a neighbour of its, or who sent it addends",
        )


def _ask(transition: Transition) -> None:
    """Sends the requests that are due. A node does one after the other."""
    state, phase = transition.state, transition.state.phase
    assert isinstance(phase, Stepping)
    busy = {node for audit in phase.audits for node in audit.awaited}
    took = phase.voted - phase.since  # not the last step's: it may have waited for audits, too
    for audit in phase.audits:
        for node in audit.auditors:
            if node in audit.requests or node in busy:
                continue
            busy.add(node)
            remembered = transition.state.auditing
            number = remembered.number + 1
            patience = audit_patience(state.lease, took, fetch_seconds(state, audit.order, node))
            transition.state = replace(transition.state, auditing=replace(remembered, number=number))
            asked = replace(audit, requests={**audit.requests, node: Request(number, transition.now + patience)})
            phase = _set_audit(transition, phase, audit, asked)
            audit = asked
            message = wire.Audit()
            message.CopyFrom(audit.order)
            message.number, message.seconds = number, AUDITORS_FRACTION * patience
            transition.send([node], wire.CoordinatorMessage(audit=message))


def _give_up_overdue(transition: Transition) -> None:
    phase = transition.state.phase
    assert isinstance(phase, Stepping)
    for audit in phase.audits:
        late = [node for node, request in audit.awaited.items() if transition.now >= request.until]
        if not late:
            continue
        phase = _set_audit(transition, phase, audit, replace(audit, answers={**audit.answers, **dict.fromkeys(late)}))
        for node in late:
            memory.silent(transition, node, (audit.order.generation, phase.step))
        transition.log(f"{name_some(late)} did not say in time what came of an audit of {audit.order.node}")


def _set_audit(transition: Transition, phase: Stepping, before: Audit, after: Audit | None) -> Stepping:
    """Replaces the audit, or drops it (None). Returns the phase as it is now."""
    audits = tuple(after if each is before else each for each in phase.audits)
    phase = replace(phase, audits=tuple(each for each in audits if each is not None))
    transition.enter(phase)
    return phase

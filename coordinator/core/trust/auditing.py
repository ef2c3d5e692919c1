"""The audits of a step: asks auditors, takes their answers, and gives up on late ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from dtfm.coordinator.core.audits import COMPARED, Audit, Passed, Request
from dtfm.coordinator.core.findings import Doubt, Unwell
from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.refusal import require
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.timeouts import AUDITORS_FRACTION, step_patience
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.disputes import kept_apart
from dtfm.coordinator.core.trust.draw import chance, draw, needed, order_for
from dtfm.coordinator.core.trust.judgement import View, judged, referees, views_of
from dtfm.coordinator.core.trust.passed import read_passed
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.standing import Standing, earned, standing_of
from dtfm.coordinator.log.trust import Audits
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.chains import micro_batches_of
from dtfm.scheduler.model.plan import Plan

SILENT = "SILENT"
"""NodeOutOfUse.problem when a node does not answer an audit in time."""

ROUND_FACTOR = 3
"""For a round, an auditor gets this many times as long as it needs for the same number of micro-batches of its own."""

MOST_TRIES = 20
"""The number of steps whose audits of a node may fail. After that the audit is not tried again."""

NEWCOMERS_WEIGHT = 5.0
"""Among strangers, unproven nodes are audited this many times more. A stranger may lie from its first step on."""


def passed_in(state: State, phase: Stepping, node: str, vote: wire.StepReady) -> Mapping[str, Passed]:
    """By node that has voted, including this one: the tensors that it says were passed on. Empty if the step cannot be audited.
    Raises Refused."""
    plan, described = state.ledger.training.in_force, state.ledger.description
    if not state.run.trust.audits or phase.resumed:
        return {}
    exchanges = state.rounds.exchanges(phase.step)
    return {**phase.passed, node: read_passed(vote, plan, node, described, exchanges=exchanges)}


def drawn(transition: Transition, phase: Stepping) -> tuple[Audit, ...]:
    """Draws the audits of a step that all nodes have voted for. Nobody is asked yet, see `conclude`."""
    state, plan = transition.state, transition.state.ledger.training.in_force
    if not phase.passed:
        return ()
    party = state.ledger.party
    random, exchanges = chance(state.secret, plan.generation, phase.step), state.rounds.exchanges(phase.step)
    found = draw(
        plan,
        state.run.trust.audits,
        random,
        party,
        {node for node, vote in phase.votes.items() if vote.kept},
        lambda node: _weight(state, node),
        exchanges=exchanges,
        apart=kept_apart(state.ledger),
        believed={node for node in plan.nodes if standing_of(state.ledger, node) is Standing.BELIEVED},
    )
    found = tuple(each for each in found if not exchanges or _can_be_done_again(state, plan, each.node))
    audits = tuple(Audit(order_for(state, phase, plan, each, random), (each.by,)) for each in found)
    drawn_again = {party(audit.order.node) for audit in audits if audit.order.micro_batches or audit.order.trained}
    due = {node: times + (party(node) in drawn_again) for node, times in state.auditing.due.items()}
    due = {node: times for node, times in due.items() if times < MOST_TRIES}
    transition.state = replace(transition.state, auditing=replace(transition.state.auditing, due=due))
    return audits


def _can_be_done_again(state: State, plan: Plan, node: str) -> bool:
    """Whether others can repeat the node's round: its island has other nodes, or others know the state that it began with."""
    is_alone = [node] in [[*island.nodes] for island in plan.islands]
    return not is_alone or (state.rounds.restarts and node in state.ledger.training.debts.alone.values())


def heard(transition: Transition, node: str, answer: wire.Audited) -> None:
    """Takes an auditor's answer. Ignores an answer that is not awaited."""
    phase = transition.state.phase
    audits = phase.audits if isinstance(phase, Stepping) else ()
    asked = [audit for audit in audits if node in audit.awaited and audit.awaited[node].number == answer.number]
    if not asked:
        transition.log(f"ignored the answer of {node} to audit {answer.number}: it is not awaited")
        return
    assert isinstance(phase, Stepping)
    _check(answer, needed(asked[0].order))
    _set_audit(transition, phase, asked[0], replace(asked[0], answers={**asked[0].answers, node: answer}))


def conclude(transition: Transition) -> None:
    """The rule: when all nodes have voted, asks auditors, gives up on late ones, and judges the audits that are answered. Audits
    that still wait stay in the phase."""
    phase = transition.state.phase
    if transition.state.stopped or not isinstance(phase, Stepping) or phase.commit_by is None:
        return
    phase = _give_up_overdue(transition, phase)
    for audit in phase.audits:
        if len(audit.answers) == len(audit.auditors):
            if more := referees(transition.state, audit):
                phase = _set_audit(transition, phase, audit, replace(audit, auditors=(*audit.auditors, *more)))
                continue
            phase = _set_audit(transition, phase, audit, None)
            if (setback := judged(transition, audit)) is not None:
                audit_next(transition, {audit.order.node})
                transition.find(setback)
                return
    _ask(transition, phase)


def interrupted(transition: Transition, phase: Stepping, ender: str) -> tuple[Doubt, ...]:
    """The doubts if the step ends while audits are open. The audited nodes are audited when they next take part.

    ``ender``: the node that has left, or says that it cannot do the step. If an auditor has found its work wrong by then, it
    may have ended the step for that reason, and is in doubt. If no auditor has, it is not: nodes come and go. In both cases a
    stranger begins again as a newcomer, so that evading an audit pays for no party."""
    party, doubts = transition.state.ledger.party, list[Doubt]()
    audited = {party(audit.order.node) for audit in phase.audits}
    known = transition.state.ledger.trust.audits.get(party(ender), Audits())
    if ender and transition.state.ledger.is_open and party(ender) in audited and known.clean:
        transition.emit(ev.StandingLost(ender, f"it ended step {phase.step} while its work was being audited"))
    for audit in phase.audits:
        node, views = audit.order.node, views_of(transition.state, audit)
        if not ender or party(node) != party(ender):
            continue
        reason = f"it ended step {phase.step} while its work was being audited"
        against = [by for by, view in views.items() if view in (View.WRONG, View.WITHHELD)]
        doubts += [Doubt(Charge.WITHHELD, (node, by), reason, (by,)) for by in against]
    audit_next(transition, {audit.order.node for audit in phase.audits})
    return tuple(doubts)


def audit_next(transition: Transition, nodes: Collection[str]) -> None:
    """These nodes are audited in any case when they next take part in a step. An audit of them failed, or a norm that one party
    alone says was bounded."""
    memory = transition.state.auditing
    due = {**memory.due, **dict.fromkeys(nodes, 0)}
    transition.state = replace(transition.state, auditing=replace(memory, due=due))


def _weight(state: State, node: str) -> float:
    party = state.ledger.party
    if state.auditing.due and party(node) in set(map(party, state.auditing.due)):
        return 1 / state.run.trust.audits
    strange = state.ledger.is_open and standing_of(state.ledger, node) < Standing.PROVEN
    return NEWCOMERS_WEIGHT if strange else 1.0


def _check(answer: wire.Audited, needed: Collection[str]) -> None:
    """Raises Refused."""
    for kind in COMPARED:
        error = getattr(answer, kind)
        require(error == -1 or error >= 0, f"audited.{kind}", error, "-1, or 0 or more")
    by, wanted = answer.withheld_by, "the audited node, one of its neighbours, or a sender of its addends"
    require(not by or by in needed, "audited.withheld_by", by, wanted)


def _ask(transition: Transition, phase: Stepping) -> None:
    """Sends the requests that are due. A node works on one request at a time."""
    state = transition.state
    busy = {node for audit in phase.audits for node in audit.awaited}
    took = phase.voted - phase.since  # not the previous step's time: that may include waiting for audits
    usual = step_patience(state.lease, took, usual=True)
    audits, number = list(phase.audits), state.auditing.number
    for place, audit in enumerate(audits):
        requests = dict(audit.requests)
        for node in audit.auditors:
            if node in requests or node in busy:
                continue
            busy.add(node)
            number += 1
            patience = usual + _seconds_for_round(state, audit.order, node)
            requests[node] = Request(number, transition.now + patience)
            message = wire.Audit()
            message.CopyFrom(audit.order)
            message.number, message.seconds = number, AUDITORS_FRACTION * patience
            transition.send([node], wire.CoordinatorMessage(audit=message))
        if len(requests) > len(audit.requests):
            audits[place] = replace(audit, requests=requests)
    if number > state.auditing.number:
        transition.set_phase(replace(phase, audits=tuple(audits)))
        transition.state = replace(transition.state, auditing=replace(state.auditing, number=number))


def _seconds_for_round(state: State, order: wire.Audit, by: str) -> float:
    """The seconds that an auditor gets to repeat the steps of a round, from its own share of each step."""
    share_of = micro_batches_of(state.ledger.training.in_force)
    times = len(share_of[order.node]) / max(1, len(share_of[by]))
    return ROUND_FACTOR * times * len(order.trained) * (state.ledger.training.step_seconds or 0.0)


def _give_up_overdue(transition: Transition, phase: Stepping) -> Stepping:
    for audit in phase.audits:
        late = [node for node, request in audit.awaited.items() if transition.now >= request.until]
        if not late:
            continue
        phase = _set_audit(transition, phase, audit, replace(audit, answers={**audit.answers, **dict.fromkeys(late)}))
        reason = f"it did not answer in time an audit of {audit.order.node} in step {phase.step}"
        for node in late:
            transition.find(Unwell(node, SILENT, reason))
    return phase


def _set_audit(transition: Transition, phase: Stepping, before: Audit, after: Audit | None) -> Stepping:
    """Replaces the audit, or drops it (None). Returns the new phase."""
    audits = tuple(after if each is before else each for each in phase.audits)
    phase = replace(phase, audits=tuple(each for each in audits if each is not None))
    transition.set_phase(phase)
    return phase


def tell_standings(transition: Transition) -> None:
    """At the end of a tick: logs each standing that audits have changed. A quarantine has an event of its own."""
    before, ledger = transition.before.ledger, transition.state.ledger
    if ledger.trust.audits is before.trust.audits:
        return
    for node in sorted(ledger.members):
        who = ledger.party(node)
        if ledger.trust.audits.get(who) is before.trust.audits.get(who) or ledger.quarantine_of(node) is not None:
            continue
        now = earned(ledger, node)
        if now.standing is not standing_of(before, node):
            transition.emit(ev.StandingChanged(node, now.standing.word, now.reason))

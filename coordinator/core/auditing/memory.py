"""What is remembered of audits that came to nothing, and of those that came to something. Strikes outlast a restart: the log has
them, but not how many audits have come to something since the last one was worked off."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from dtfm.coordinator.core.state import Stepping
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.audits import Auditing, OpenRequest
from dtfm.coordinator.core.trust.standing import party_of
from dtfm.coordinator.core.trust.strikes import MOST_RECORDS, Key, Record, Strike, struck, worked_off
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger

MOST_LEFT = 256
"""So many requests are remembered whose answers may still come though the audited node has left."""

MOST_TRIES = 20
"""The number of steps in a row in which an audit that is due may come to nothing. After that it is due no more."""


def remembered(ledger: Ledger, number: int = 0) -> Auditing:
    """What the log says of strikes, for a process that starts. ``number``: of the last audit that was asked for."""
    memory = Auditing(number)
    for each in ledger.trust.strikes:
        who, of = (ledger.party(name) for name in (each.node, each.of))
        strike = Strike(each.generation, each.step, each.node, each.by, each.ended)
        if each.of:
            memory = replace(memory, withheld=struck(memory.withheld, (who, of), strike))
        else:
            memory = replace(memory, silent=struck(memory.silent, who, strike))
    return memory


def withheld(
    transition: Transition, node: str, of: str, by: Collection[str], attempt: tuple[int, int], *, ended: bool = False
) -> None:
    """``by`` say that the node did not hand out what an audit ``of`` its own or another's work needs, in this ``attempt``
    (generation, step); ``ended``: or they came to something else, and it ended the step. If the work was its own party's, that is
    done again when it next takes part."""
    memory, party = transition.state.auditing, party_of(transition.state.ledger)
    strike = Strike(*attempt, node, tuple(sorted(by)), ended)
    records = struck(memory.withheld, (party(node), party(of)), strike)
    due = _now_due(memory.due, [of]) if party(node) == party(of) else memory.due
    transition.state = replace(transition.state, auditing=replace(memory, withheld=records, due=due))
    generation, step = attempt
    transition.emit(ev.AuditHindered(step, generation, node, of, strike.by, ended))


def handed_out(transition: Transition, nodes: Collection[str], of: str) -> None:
    """An audit ``of`` this node's work came to something, for which these nodes' tensors were needed. What is handed
    out for audits of one party works off no strikes in audits of another."""
    memory, party = transition.state.auditing, party_of(transition.state.ledger)
    records = memory.withheld
    for who in sorted({party(node) for node in nodes}):
        before, records = records, worked_off(records, (who, party(of)))
        _say_what_ended(transition, before, records, (who, party(of)), ev.StrikesEnded(who, party(of)))
    transition.state = replace(transition.state, auditing=replace(memory, withheld=records))


def silent(transition: Transition, node: str, attempt: tuple[int, int]) -> None:
    """It was to do others' work again, and has not said in time what came of it."""
    memory, party = transition.state.auditing, party_of(transition.state.ledger)
    records = struck(memory.silent, party(node), Strike(*attempt, node))
    transition.state = replace(transition.state, auditing=replace(memory, silent=records))
    generation, step = attempt
    transition.emit(ev.AuditHindered(step, generation, node))


def answered(transition: Transition, node: str) -> None:
    memory, party = transition.state.auditing, party_of(transition.state.ledger)
    records = worked_off(memory.silent, party(node))
    _say_what_ended(transition, memory.silent, records, party(node), ev.StrikesEnded(party(node)))
    transition.state = replace(transition.state, auditing=replace(memory, silent=records))


def forgotten(transition: Transition, who: str) -> None:
    """A verdict takes the place of what is remembered of this party."""
    memory = transition.state.auditing
    kept = {pair: record for pair, record in memory.withheld.items() if pair[0] != who}
    heard = {each: record for each, record in memory.silent.items() if each != who}
    if (kept, heard) != (memory.withheld, memory.silent):
        transition.emit(ev.StrikesEnded(who, all=True))
    transition.state = replace(transition.state, auditing=replace(memory, withheld=kept, silent=heard))


def put_off(transition: Transition, phase: Stepping, ender: str, believed: Collection[str]) -> None:
    """The step ends while audits are open. Those whose work they are of are audited when they next take part; an evaluation is
    lost. Answers about the ``ender`` may still come from the auditors that are ``believed``: it may have gone because one asked
    for its tensors."""
    memory, ledger = transition.state.auditing, transition.state.ledger
    left = dict(memory.left)
    for audit in phase.audits:
        for by, request in audit.awaited.items() if audit.order.node == ender else ():
            if by in believed:
                left[request.number] = OpenRequest(by, ender, ledger.training.generation, phase.step)
    due = _now_due(memory.due, [audit.order.node for audit in phase.audits if not audit.order.evaluation])
    memory = replace(memory, due=due, left=dict(list(left.items())[-MOST_LEFT:]))
    transition.state = replace(transition.state, auditing=memory)


def drawn_again(transition: Transition, nodes: Collection[str]) -> None:
    """These nodes' work is being done again. If nothing came of that MOST_TRIES times in a row, it is due no more."""
    memory, party = transition.state.auditing, party_of(transition.state.ledger)
    tried = {party(node) for node in nodes}
    due = {node: times + (party(node) in tried) for node, times in memory.due.items()}
    due = {node: times for node, times in due.items() if times < MOST_TRIES}
    transition.state = replace(transition.state, auditing=replace(memory, due=due))


def compared(transition: Transition, node: str) -> None:
    """Somebody has come to the same as the node or to something else. It is due no more, nor are names of its party that are
    out of the plan, under which it may have taken part before."""
    memory, ledger = transition.state.auditing, transition.state.ledger
    plan, party = ledger.training.plan, party_of(ledger)
    assert plan is not None
    due = {
        each: times
        for each, times in memory.due.items()
        if party(each) != party(node) or (each != node and each in plan.nodes)
    }
    transition.state = replace(transition.state, auditing=replace(memory, due=due))


def _say_what_ended(
    transition: Transition,
    before: Mapping[Key, Record],
    after: Mapping[Key, Record],
    whose: Key,
    event: ev.StrikesEnded,
) -> None:
    """That somebody has worked off a strike, if it has."""
    none = Record(())
    if len(after.get(whose, none).strikes) < len(before.get(whose, none).strikes):
        transition.emit(event)


def _now_due(due: Mapping[str, int], nodes: Collection[str]) -> Mapping[str, int]:
    kept = {node: times for node, times in due.items() if node not in nodes}
    return dict([*kept.items(), *((node, 0) for node in nodes)][-MOST_RECORDS:])

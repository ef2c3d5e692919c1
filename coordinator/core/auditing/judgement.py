"""What the answers to an audit come to: who else is asked, and who is wrong."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dtfm.coordinator.core.auditing import memory
from dtfm.coordinator.core.auditing.conclusion import Conclusion, Unaudited
from dtfm.coordinator.core.auditing.limits import codecs_compared, device_kinds, exceeds, limits
from dtfm.coordinator.core.auditing.views import View, is_gross, refusals, views_of
from dtfm.coordinator.core.plan_adoption import newest_before
from dtfm.coordinator.core.state import State, Stepping
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.audits import COMPARED, Audit
from dtfm.coordinator.core.trust.draw import chance
from dtfm.coordinator.core.trust.standing import party_of
from dtfm.coordinator.core.trust.verdict import Against, settle
from dtfm.coordinator.core.validation.refusal import name_some, shorten
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.trust import Audits

MOST_REFEREES = 4
"""Further parties that are asked when one has come to something else, or was given nothing to compare with, or says that a
neighbour withheld what it needs."""

MOST_UNDONE = 1000
"""Steps by which the run may go back to undo what a liar did."""


def referees(state: State, audit: Audit) -> list[str]:
    """Who else is to be asked: other parties that hold the stage. Several, once an auditor has come to something else or was
    given nothing to compare with; one, if the first auditor has come to nothing. If that is because of a neighbour, as it says,
    one after the other until one comes to something, that neighbour last, as its own answer does not clear it. They are drawn, so
    that nobody can choose a name that comes first."""
    plan, phase, party = state.ledger.training.plan, state.phase, party_of(state.ledger)
    assert plan is not None
    assert isinstance(phase, Stepping)
    views = views_of(state, audit).values()
    doubted = View.WRONG in views or View.WITHHELD in views
    if View.RIGHT in views and not doubted:
        return []
    refused = {party(each) for each in refusals(state, audit)}
    stage = plan.stages[plan.stage_of(audit.order.node) or 0]
    others: dict[str, str] = {}
    order = chance(state.secret, plan.generation, phase.step).sample(stage.replicas, len(stage.replicas))
    for node in sorted(order, key=lambda each: (party(each) in refused, not phase.votes[each].kept)):
        others.setdefault(party(node), node)
    for node in (audit.order.node, *audit.auditors):
        others.pop(party(node), None)
    most = (MOST_REFEREES if doubted or refused else 1) + 1 - len(audit.auditors)
    return list(others.values())[: max(most if doubted else min(most, 1), 0)]


def judged(transition: Transition, audit: Audit) -> Conclusion | Unaudited | None:
    """All have answered. What they came to goes into the log. The conclusion says who is wrong; None: nobody is."""
    state, node, where = transition.state, audit.order.node, _where(audit)
    views = {by: view for by, view in views_of(state, audit).items() if view is not View.NOTHING}
    by_view = {view: [by for by, its in views.items() if its is view] for view in View}
    if len(views) < len(audit.auditors):
        _say_what_came_to_nothing(transition, audit, views)
    if audit.counts and (by_view[View.RIGHT] or by_view[View.WRONG]):
        memory.compared(transition, node)
    if not by_view[View.WRONG]:
        return _judged_unless_withheld(transition, audit, by_view[View.RIGHT], by_view[View.WITHHELD])
    verdict, first = _settled(state.ledger, node, views), by_view[View.WRONG][0]
    gross, tied = is_gross(state, audit, first), verdict is None or verdict.undecided
    if verdict is not None and not gross:
        verdict = _of_what_is_unusual(transition, audit, verdict, by_view[View.WRONG])
    wrong = verdict is not None and node in verdict.members
    agreeing = by_view[View.WRONG if wrong else View.RIGHT]
    if verdict is None and not gross:
        agreeing = agreeing or by_view[View.WRONG]  # honest devices may be as far apart: now it is known to happen
    if agreeing:
        _log_audit(transition, audit, agreeing[0], clean=not wrong and not tied, tied=not wrong and tied)
    if verdict is None:
        return None
    if not wrong:
        reason = f"in {where} it said that work of {node} was wrong, which {name_some(verdict.others)} found right"
        return Conclusion(verdict, Charge.AUDIT, reason)
    sayers = name_some(by_view[View.WRONG])
    reason = f"in {where}, {sayers} did its work again and came to something else ({_said(audit, agreeing[0])})"
    if verdict.undecided or audit.order.evaluation:  # that has changed no weights
        return Conclusion(verdict, Charge.AUDIT, reason)
    return _with_undoing(transition.state, Conclusion(verdict, Charge.AUDIT, reason), audit, agreeing[0])


def _of_what_is_unusual(
    transition: Transition, audit: Audit, verdict: Against, sayers: Sequence[str]
) -> Against | None:
    """The verdict where the first who finds the work wrong found more than is usual, but no more than honest devices may ever be
    apart. Nobody goes unless more than half of the parties find it wrong. It is decided only if what is usual is known for each
    of these."""
    state, node = transition.state, audit.order.node
    if node not in verdict.members or verdict.undecided:
        said = _said(audit, sayers[0])
        transition.log(f"{sayers[0]} came to something else than {node} in {_where(audit)}: {said}")
        return None
    known = all(each.learned for by in sayers for each in limits(state, audit.order, by).values())
    return verdict if known else replace(verdict, undecided=True)


def _settled(ledger: Ledger, node: str, views: Mapping[str, View]) -> Against | None:
    """Who was given nothing to compare with counts as having found the work wrong. If that turns the scale, the verdict is
    undecided."""
    right = {node: True, **{by: view is View.RIGHT for by, view in views.items()}}
    verdict = settle(ledger, right, operator.eq)
    compared = settle(ledger, {by: its for by, its in right.items() if views.get(by) is not View.WITHHELD}, operator.eq)
    if verdict is None or (compared is not None and compared.members == verdict.members and not compared.undecided):
        return verdict
    return replace(verdict, undecided=True)


def _judged_unless_withheld(
    transition: Transition, audit: Audit, right: Sequence[str], withheld: Sequence[str]
) -> Unaudited | None:
    """Nobody says that the work is wrong. If more say that the node withheld it than find it right, it does not count."""
    node = audit.order.node
    if right and len(withheld) <= len(right):
        if audit.counts:
            memory.handed_out(transition, (node,), node)
        _log_audit(transition, audit, right[0], clean=True)
    elif withheld:
        memory.withheld(transition, node, node, withheld, (audit.order.generation, audit.order.step))
        sayers = name_some(withheld)
        return Unaudited(node, f"in {_where(audit)} it withheld what {sayers} came to something else about")
    return None


def _say_what_came_to_nothing(transition: Transition, audit: Audit, came: Collection[str]) -> None:
    for by, answer in audit.answers.items():
        if answer is not None and by not in came:
            why = shorten(answer.problem) or f"{answer.withheld_by} withheld something" * bool(answer.withheld_by)
            why = why or "it has compared nothing"
            transition.log(f"{by} could not audit {audit.order.node} in {_where(audit)}: {why}")


def _with_undoing(state: State, found: Conclusion, audit: Audit, by: str) -> Conclusion:
    """The conclusion, with how far the run goes back: what the node did since its last clean audit is suspect. If only what it
    adds was wrong, that is the last audit that compared what it adds."""
    ledger, node, answer = state.ledger, audit.order.node, audit.answers[by]
    assert answer is not None
    who = ledger.party(node)
    others = {what: each.usual for what, each in limits(state, audit.order, by).items() if what != "addends"}
    audits = ledger.trust.audits.get(who, Audits())
    last = audits.last_of if exceeds(answer, others) else audits.last_added
    clean = max(last.get(node, 0), ledger.trust.began.get(who, 0))
    if clean >= ledger.training.step:
        return found
    back = ledger.training.step - newest_before(state, clean + 1).step
    if back > MOST_UNDONE:
        reason = f"{found.reason}; what it did since step {clean} stays, as undoing it would take {back} steps"
        return replace(found, reason=reason)
    return replace(found, back_before=clean + 1)


def _log_audit(transition: Transition, audit: Audit, by: str, *, clean: bool, tied: bool = False) -> None:
    order, answer = audit.order, audit.answers[by]
    assert answer is not None
    errors = {kind: min(getattr(answer, kind), 1e9) for kind in COMPARED if getattr(answer, kind) >= 0}
    kinds = device_kinds(transition.state, order.node, by)
    transition.emit(
        ev.WorkAudited(
            step=order.step,
            generation=order.generation,
            node=order.node,
            by=by,
            micro_batches=len(order.micro_batches),
            clean=clean,
            errors=errors,
            key=transition.state.ledger.key_of(order.node),
            by_key=transition.state.ledger.key_of(by),
            kinds=kinds if len(kinds) == 2 else (),
            codecs=codecs_compared(transition.state, order),
            why="evaluation" if order.evaluation else "drawn",
            others=max(_others(transition.state, order.node), 1),
            tied=tied,
        )
    )


def _where(audit: Audit) -> str:
    order = audit.order
    return f"the evaluation after step {order.step - 1}" if order.evaluation else f"step {order.step}"


def _others(state: State, node: str) -> int:
    """The number of other parties that hold the node's stage, and kept what they sent."""
    plan, phase, party = state.ledger.training.plan, state.phase, party_of(state.ledger)
    assert plan is not None
    assert isinstance(phase, Stepping)
    stage = plan.stages[plan.stage_of(node) or 0]
    return len({party(each) for each in stage.replicas if phase.votes[each].kept} - {party(node)})


def _said(audit: Audit, by: str) -> str:
    answer = audit.answers[by]
    errors = {kind: getattr(answer, kind) for kind in COMPARED}
    return ", ".join(f"{kind} {error:.2g}" for kind, error in errors.items() if error > 0 or math.isinf(error))

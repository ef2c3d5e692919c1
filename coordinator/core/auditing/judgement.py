"""What the answers to an audit come to: who else is asked, and who is wrong."""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dtfm.coordinator.core.auditing import memory
from dtfm.coordinator.core.auditing.conclusion import Conclusion, Unaudited
from dtfm.coordinator.core.plan_adoption import newest_before
from dtfm.coordinator.core.state import State, Stepping
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.audits import COMPARED, Audit
from dtfm.coordinator.core.trust.codecs import codec_in_use
from dtfm.coordinator.core.trust.standing import party_of
from dtfm.coordinator.core.trust.tolerance import tolerance
from dtfm.coordinator.core.trust.verdict import Against, settle
from dtfm.coordinator.core.validation import name_some, shorten
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Audits, Ledger
from dtfm.protos import control_pb2 as wire

MOST_REFEREES = 4
"""Further parties that are asked when one has come to something else, or was given nothing to compare with."""

REFEREE_FRACTION = 0.5
"""Of the tolerance, from which on a referee counts as having come to something else as well. So nobody can lie by just so much
that auditors, whose devices differ, fall out over it."""

MOST_UNDONE = 1000
"""Steps by which the run may go back to undo what a liar did."""


def _limits(state: State, order: wire.Audit) -> Mapping[str, float]:
    """By what is to be compared, the largest relative error that is rounding's."""
    precision, codecs, plan = state.run.train.precision, state.ledger.codecs.get(order.node, {}), state.ledger.plan
    assert plan is not None

    def of(tensors: str, receivers: Collection[str]) -> float:
        used = {codec_in_use(state.run.network, codecs.get(to, {}), tensors) for to in receivers}
        return max(tolerance(precision, codec) for codec in used)

    limits = {}
    if onward := {each.next for each in order.micro_batches if each.next}:
        limits["activations"] = of("activations", onward)
    else:
        limits["losses"] = tolerance(precision)
    if back := {each.previous for each in order.micro_batches if each.previous}:
        limits["gradients"] = of("gradients", back)
    if order.HasField("bucket"):
        limits["addends"] = of("reduction", [node for node in plan.nodes if node != order.node])
    return limits


class View(enum.Enum):
    """What an auditor has come to."""

    RIGHT = "right"
    WRONG = "wrong"
    WITHHELD = (
        "withheld"  # to something else than the node voted, or that is rounding: it was not given what to compare with
    )
    NOTHING = "nothing"


def views_of(state: State, audit: Audit) -> Mapping[str, View]:
    """By auditor. Once one has come to something else, half of the tolerance is the border for the others."""
    views: dict[str, View] = {}
    limits = _limits(state, audit.order)
    for by in audit.auditors:
        fraction = REFEREE_FRACTION if View.WRONG in views.values() else 1.0
        views[by] = _view_of(audit.answers.get(by), audit.order.node, limits, fraction)
    return views


def _view_of(answer: wire.Audited | None, node: str, limits: Mapping[str, float], fraction: float) -> View:
    if answer is None:
        return View.NOTHING
    if any(getattr(answer, kind) > fraction * limit for kind, limit in limits.items()):
        return View.WRONG
    if answer.withheld_by == node:
        return View.WITHHELD
    if answer.problem or answer.withheld_by or any(getattr(answer, kind) < 0 for kind in limits):
        return View.NOTHING
    return View.RIGHT


def referees(state: State, audit: Audit) -> list[str]:
    """Who else is to be asked: other parties that hold the stage. Once somebody has come to something else, or was given nothing
    to compare with, several; one, if the first has come to nothing."""
    plan, phase, party = state.ledger.plan, state.phase, party_of(state.ledger)
    assert plan is not None
    assert isinstance(phase, Stepping)
    views = views_of(state, audit).values()
    doubted = View.WRONG in views or View.WITHHELD in views
    if View.RIGHT in views and not doubted:
        return []
    stage = plan.stages[plan.stage_of(audit.order.node) or 0]
    others: dict[str, str] = {}
    for node in sorted(stage.replicas, key=lambda each: (not phase.votes[each].kept, each)):
        others.setdefault(party(node), node)
    for node in (audit.order.node, *audit.auditors):
        others.pop(party(node), None)
    return list(others.values())[: max((MOST_REFEREES if doubted else 1) + 1 - len(audit.auditors), 0)]


def judged(transition: Transition, audit: Audit) -> Conclusion | Unaudited | None:
    """All have answered. What they came to goes into the log; the conclusion is about who is wrong, if anybody is."""
    state, node, step = transition.state, audit.order.node, audit.order.step
    views = {by: view for by, view in views_of(state, audit).items() if view is not View.NOTHING}
    by_view = {view: [by for by, its in views.items() if its is view] for view in View}
    if len(views) < len(audit.auditors):
        _say_what_came_to_nothing(transition, audit, views)
    if not by_view[View.WRONG]:
        return _judged_unless_withheld(transition, audit, by_view[View.RIGHT], by_view[View.WITHHELD])
    verdict = _settled(state.ledger, node, views)
    wrong = verdict is not None and node in verdict.members
    if agreeing := by_view[View.WRONG if wrong else View.RIGHT]:
        _log_audit(transition, audit, agreeing[0], clean=not wrong)
    if verdict is None:
        return None
    if not wrong:
        reason = f"in step {step} it said that work of {node} was wrong, which {name_some(verdict.others)} found right"
        return Conclusion(verdict, Charge.AUDIT, reason)
    sayers = name_some(by_view[View.WRONG])
    reason = f"in step {step}, {sayers} did its work again and came to something else ({_said(audit, agreeing[0])})"
    if verdict.undecided:
        return Conclusion(verdict, Charge.AUDIT, reason)
    return _with_undoing(transition.state, Conclusion(verdict, Charge.AUDIT, reason), node)


def _settled(ledger: Ledger, node: str, views: Mapping[str, View]) -> Against | None:
    """Who was given nothing to compare with has come to something else as well. It is undecided if that turns the scale."""
    right = {node: True, **{by: view is View.RIGHT for by, view in views.items()}}
    verdict = settle(ledger, right, operator.eq)
    compared = settle(ledger, {by: its for by, its in right.items() if views.get(by) is not View.WITHHELD}, operator.eq)
    if verdict is None or (compared is not None and compared.members == verdict.members and not compared.undecided):
        return verdict
    return replace(verdict, undecided=True)


def _judged_unless_withheld(
    transition: Transition, audit: Audit, right: Sequence[str], withheld: Sequence[str]
) -> Unaudited | None:
    """Nobody says that the work is wrong. It does not count if more say that the node withheld it than find it right."""
    node, step = audit.order.node, audit.order.step
    if right and len(withheld) <= len(right):
        if audit.raised_by is None:  # else a friend could have chosen the step
            memory.handed_out(transition, (node,), node)
        _log_audit(transition, audit, right[0], clean=True)
    elif withheld:
        memory.withheld(transition, node, node, withheld, (audit.order.generation, step))
        sayers = name_some(withheld)
        return Unaudited(node, f"in step {step} it withheld what {sayers} came to something else about")
    return None


def _say_what_came_to_nothing(transition: Transition, audit: Audit, came: Collection[str]) -> None:
    for by, answer in audit.answers.items():
        if answer is not None and by not in came:
            why = shorten(answer.problem) or f"{answer.withheld_by} withheld something" * bool(answer.withheld_by)
            why = why or "it has compared nothing"
            transition.log(f"{by} could not audit {audit.order.node} in step {audit.order.step}: {why}")


def _with_undoing(state: State, found: Conclusion, node: str) -> Conclusion:
    """What the node did since its last clean audit is suspect: whether, and how far, the run goes back."""
    ledger = state.ledger
    who = ledger.key_of(node) or node
    clean = max(ledger.audits.get(who, Audits()).last, ledger.began.get(who, 0))
    if clean >= ledger.step:
        return found
    back = ledger.step - newest_before(state, clean + 1).step
    if back > MOST_UNDONE:
        reason = f"{found.reason}; what it did since step {clean} stays, as undoing it would take {back} steps"
        return replace(found, reason=reason)
    return replace(found, back_before=clean + 1)


def _log_audit(transition: Transition, audit: Audit, by: str, *, clean: bool) -> None:
    order, answer = audit.order, audit.answers[by]
    assert answer is not None
    errors = {kind: min(getattr(answer, kind), 1e9) for kind in COMPARED if getattr(answer, kind) >= 0}
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
            why="drawn" if audit.raised_by is None else "unusual",
            raised_by=audit.raised_by or "",
        )
    )


def _said(audit: Audit, by: str) -> str:
    answer = audit.answers[by]
    errors = {kind: getattr(answer, kind) for kind in COMPARED}
    return ", ".join(f"{kind} {error:.2g}" for kind, error in errors.items() if error > 0 or math.isinf(error))

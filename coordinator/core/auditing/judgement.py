"""What the answers to an audit come to: who else is asked, and who is wrong."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import replace

from dtfm.coordinator.core.auditing.conclusion import Conclusion
from dtfm.coordinator.core.plan_adoption import newest_before
from dtfm.coordinator.core.state import State, Stepping
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.audits import COMPARED, Audit
from dtfm.coordinator.core.trust.codecs import codec_in_use
from dtfm.coordinator.core.trust.standing import party_of
from dtfm.coordinator.core.trust.tolerance import tolerance
from dtfm.coordinator.core.trust.verdict import settle
from dtfm.coordinator.core.validation import name_some, shorten
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Audits
from dtfm.protos import control_pb2 as wire

MOST_REFEREES = 4
"""Further parties that are asked when one has come to something else."""

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


def _found_right(state: State, audit: Audit, node: str) -> bool | None:
    """Whether the auditor came to the same; None: it came to nothing."""
    answer, fraction = audit.answers.get(node), 1.0 if node == audit.auditors[0] else REFEREE_FRACTION
    if answer is None or answer.problem or answer.withheld_by:
        return None
    limits = _limits(state, audit.order)
    if any(getattr(answer, kind) > fraction * limit for kind, limit in limits.items()):
        return False
    return None if any(getattr(answer, kind) < 0 for kind in limits) else True


def referees(state: State, audit: Audit) -> list[str]:
    """Who else is to be asked, as the only one who was has come to something else: other parties that hold the stage."""
    plan, phase, party = state.ledger.plan, state.phase, party_of(state.ledger)
    assert plan is not None
    assert isinstance(phase, Stepping)
    if len(audit.auditors) > 1 or _found_right(state, audit, audit.auditors[0]) is not False:
        return []
    stage = plan.stages[plan.stage_of(audit.order.node) or 0]
    others: dict[str, str] = {}
    for node in sorted(stage.replicas, key=lambda each: (not phase.votes[each].kept, each)):
        others.setdefault(party(node), node)
    for node in (audit.order.node, *audit.auditors):
        others.pop(party(node), None)
    return list(others.values())[:MOST_REFEREES]


def judged(transition: Transition, audit: Audit) -> Conclusion | None:
    """All have answered. What they came to goes into the log; the conclusion is about who is wrong, if anybody is."""
    state, node = transition.state, audit.order.node
    step = audit.order.step
    views = {by: right for by in audit.auditors if (right := _found_right(state, audit, by)) is not None}
    if not views:
        for by, answer in audit.answers.items():
            if answer is not None:
                why = shorten(answer.problem) or f"{answer.withheld_by} withheld something" * bool(answer.withheld_by)
                transition.log(f"{by} could not audit {node} in step {step}: {why or 'it has compared nothing'}")
        return None
    verdict = settle(state.ledger, {node: True, **views}, operator.eq)
    wrong = verdict is not None and node in verdict.members
    if agreeing := [by for by, right in views.items() if right is not wrong]:
        _log_audit(transition, audit, agreeing[0], clean=not wrong)
    if verdict is None:
        return None
    sayers = name_some(by for by, right in views.items() if not right)
    if not wrong:
        reason = f"in step {step} it said that work of {node} was wrong, which {name_some(verdict.others)} found right"
        return Conclusion(verdict, Charge.AUDIT, reason)
    reason = f"in step {step}, {sayers} did its work again and came to something else ({_said(audit, agreeing[0])})"
    if verdict.undecided:
        return Conclusion(verdict, Charge.AUDIT, reason)
    return _with_undoing(transition.state, Conclusion(verdict, Charge.AUDIT, reason), node)


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

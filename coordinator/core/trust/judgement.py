"""Decides the result of an audit when every auditor has answered."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import replace

from dtfm.coordinator.core.audits import COMPARED, Audit
from dtfm.coordinator.core.findings import Doubt, Setback, contradicting
from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.refusal import name_some, shorten
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.draw import can_do_again, chance
from dtfm.coordinator.core.trust.tolerance import limits
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.standing import standing_of
from dtfm.coordinator.log.steps import SETTLED, UNAUDITED
from dtfm.coordinator.log.trust import Audits
from dtfm.protos import control_pb2 as wire

MOST_REFEREES = 4
"""The most further parties that are asked. They are asked if an auditor got another result, was given nothing to compare with, or
says that a neighbour withheld a tensor that the audit needs."""

REFEREE_FRACTION = 0.5
"""The part of the tolerance that a referee allows. Without it, a node could lie by an amount that one honest device finds wrong
and another finds right."""

REFEREE_FRACTION_OF_ROUNDS = 0.75
"""The same for a round, where the results of honest devices differ by more of the tolerance."""

MOST_LOGGED = 1e9
"""Larger errors are logged as this."""


class View(enum.Enum):
    """An auditor's result. WITHHELD: the node, or another node of its party, did not hand out what to compare."""

    RIGHT = "right"
    WRONG = "wrong"
    WITHHELD = "withheld"
    NOTHING = "nothing"


def views_of(state: State, audit: Audit) -> Mapping[str, View]:
    """The result by auditor. If an auditor has found the work wrong, later ones allow REFEREE_FRACTION of the tolerance."""
    views: dict[str, View] = {}
    for by in audit.auditors:
        answer, is_referee = audit.answers.get(by), View.WRONG in views.values()
        views[by] = View.NOTHING if answer is None else _view_of(state, audit, answer, is_referee=is_referee)
    return views


def referees(state: State, audit: Audit) -> list[str]:
    """The further nodes to ask: of other parties that can repeat the work, believed nodes first.

    Asks several if an auditor got another result or was given nothing to compare with; one if the first auditor got no result.
    They are drawn at random, so that nobody can choose a name that comes first."""
    plan, phase, party = state.ledger.training.in_force, state.phase, state.ledger.party
    assert isinstance(phase, Stepping)
    views = views_of(state, audit).values()
    doubted = View.WRONG in views or View.WITHHELD in views
    if View.RIGHT in views and not doubted:
        return []
    refused = {party(each) for each in _withheld_by_neighbours(state, audit)}
    able = can_do_again(plan, audit.order.node, state.rounds.exchanges(phase.step))
    order = chance(state.secret, plan.generation, phase.step).sample(able, len(able))

    def last(node: str) -> tuple[bool, int, bool]:
        return party(node) in refused, -standing_of(state.ledger, node), not phase.votes[node].kept

    others: dict[str, str] = {}
    for node in sorted(order, key=last):
        others.setdefault(party(node), node)
    for node in (audit.order.node, *audit.auditors):
        others.pop(party(node), None)
    most = (MOST_REFEREES if doubted or refused else 1) + 1 - len(audit.auditors)
    return list(others.values())[: max(most if doubted else min(most, 1), 0)]


def judged(transition: Transition, audit: Audit) -> Setback | None:
    """The finding when all auditors have answered; None: no auditor says that the work is wrong. If an auditor does, the step
    does not count, whoever is right: the auditors that found the work wrong contradict the node, and the other auditors."""
    state, node = transition.state, audit.order.node
    views = views_of(state, audit)
    by_view = {view: [by for by, its in views.items() if its is view] for view in View}
    right, wrong, withheld = by_view[View.RIGHT], by_view[View.WRONG], by_view[View.WITHHELD]
    for by in by_view[View.NOTHING]:
        if (answer := audit.answers[by]) is not None:
            why = shorten(answer.problem) or f"{answer.withheld_by} withheld something" * bool(answer.withheld_by)
            transition.log(
                f"{by} could not audit {node} in step {audit.order.step}: {why or 'it has compared nothing'}"
            )
    if doubts := _neighbours_in_doubt(state, audit, right + wrong + withheld):
        transition.find(doubts)
    if right and not wrong and not withheld:
        # Without repeated work the auditors have only compared digests that both have, which proves nothing.
        if audit.order.micro_batches or audit.order.trained:
            _log_audit(transition, audit, right[0], clean=True)
            _due_no_more(transition, node)
        return None
    if wrong:
        _log_audit(transition, audit, wrong[0], clean=False)
        reason = (
            f"in step {audit.order.step} {name_some(wrong)} repeated work of {node} and got another result "
            f"({_said(audit, wrong[0])}){f', which {name_some(right)} found right' if right else ''}"
        )
        pairs = [(one, other) for one in wrong for other in (node, *right)]
        since = clean_until(state, node) if len(wrong) > len(right) else None
        return Setback(SETTLED, node, reason, contradicting(Charge.AUDIT, pairs, reason), since=since)
    if withheld and len(withheld) > len(right):
        reason = f"in step {audit.order.step} it withheld what {name_some(withheld)} got another result for"
        doubts = tuple(Doubt(Charge.WITHHELD, (node, by), reason, (by,)) for by in withheld)
        return Setback(UNAUDITED, node, reason, doubts)
    return None


def _due_no_more(transition: Transition, node: str) -> None:
    """An auditor has found the node's work right: it is no longer due for an audit. Names of its party outside the plan are not
    due either."""
    memory, ledger = transition.state.auditing, transition.state.ledger
    plan, party = ledger.training.in_force, ledger.party
    if not memory.due:
        return
    due = {
        each: times
        for each, times in memory.due.items()
        if party(each) != party(node) or (each != node and each in plan.nodes)
    }
    transition.state = replace(transition.state, auditing=replace(memory, due=due))


def clean_until(state: State, node: str) -> int:
    """The last step for which the node's work was found right, or before which it did no work. If its addends to gradients were
    ever compared, the last comparison of addends counts: an audit of only a few micro-batches would not see a lie about them."""
    who, trust = state.ledger.party(node), state.ledger.trust
    audits = trust.audits.get(who, Audits())
    return max(audits.last_added.get(node, audits.last_of.get(node, 0)), trust.began.get(who, 0))


def _view_of(state: State, audit: Audit, answer: wire.Audited, *, is_referee: bool) -> View:
    """The auditor's result. In bf16 an answer without addends still counts: addends of a bucket of only norms depend on the
    number of threads (node/training/audits/step_again.py)."""
    most = limits(state, audit.order)
    of_referees = REFEREE_FRACTION_OF_ROUNDS if audit.order.trained else REFEREE_FRACTION
    fraction = of_referees if is_referee else 1.0
    if any(getattr(answer, what) > fraction * error for what, error in most.items()):
        return View.WRONG
    if answer.withheld_by and state.ledger.party(answer.withheld_by) == state.ledger.party(audit.order.node):
        return View.WITHHELD
    roughly = state.run.train.precision == "bf16" and audit.order.micro_batches
    compared = [what for what in most if what != "addends" or not roughly]
    incomplete = answer.problem or answer.withheld_by or any(getattr(answer, what) < 0 for what in compared)
    return View.NOTHING if incomplete else View.RIGHT


def _withheld_by_neighbours(state: State, audit: Audit) -> Mapping[str, list[str]]:
    """By node that withheld a tensor which the audit needs, the auditors that say so. Leaves out the audited party, and nodes
    that could not be reached."""
    party, of = state.ledger.party, audit.order.node
    found: dict[str, list[str]] = {}
    for by, answer in audit.answers.items():
        if answer is None or not answer.withheld_by or party(answer.withheld_by) == party(of):
            continue
        if not answer.unreachable:
            found.setdefault(answer.withheld_by, []).append(by)
    return found


def _neighbours_in_doubt(state: State, audit: Audit, came: list[str]) -> tuple[Doubt, ...]:
    """The doubts about nodes that did not hand out a tensor for the audit, unless another party has got the tensor from them.
    ``came``: the auditors that have got a result."""
    party = state.ledger.party
    return tuple(
        Doubt(Charge.WITHHELD, (node, by), f"it withheld what an audit of {audit.order.node} needed", (by,))
        for node, sayers in _withheld_by_neighbours(state, audit).items()
        for by in sayers
        if {party(each) for each in came} <= {party(node)}
    )


def _log_audit(transition: Transition, audit: Audit, by: str, *, clean: bool) -> None:
    order, answer = audit.order, audit.answers[by]
    assert answer is not None
    errors = {kind: min(getattr(answer, kind), MOST_LOGGED) for kind in COMPARED if getattr(answer, kind) >= 0}
    transition.emit(
        ev.WorkAudited(
            step=order.step,
            generation=order.generation,
            node=order.node,
            by=by,
            micro_batches=len(order.micro_batches)
            or sum(sum(s.borders[1::2]) - sum(s.borders[::2]) for s in order.trained),
            clean=clean,
            errors=errors,
            others=max(_others(transition.state, order.node), 1),
        )
    )


def _others(state: State, node: str) -> int:
    """The number of other parties that can repeat the node's work, and kept the tensors they sent."""
    plan, phase, party = state.ledger.training.in_force, state.phase, state.ledger.party
    assert isinstance(phase, Stepping)
    able = can_do_again(plan, node, state.rounds.exchanges(phase.step))
    return len({party(each) for each in able if phase.votes[each].kept} - {party(node)})


def _said(audit: Audit, by: str) -> str:
    answer = audit.answers[by]
    errors = {kind: getattr(answer, kind) for kind in COMPARED}
    return ", ".join(f"{kind} {error:.2g}" for kind, error in errors.items() if error > 0 or math.isinf(error))

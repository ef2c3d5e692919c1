"""What each auditor has come to."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from dtfm.coordinator.core.auditing.limits import exceeds, limits
from dtfm.coordinator.core.state import State
from dtfm.coordinator.core.trust.audits import Audit
from dtfm.coordinator.core.trust.standing import party_of
from dtfm.protos import control_pb2 as wire

REFEREE_FRACTION = 0.5
"""The part of the tolerance that a referee allows. Without it, somebody could lie by an amount that one honest device finds wrong
and another finds right."""


class View(enum.Enum):
    """What an auditor has come to. WITHHELD: to another digest than the node's, which did not hand out what to compare with."""

    RIGHT = "right"
    WRONG = "wrong"
    WITHHELD = "withheld"
    NOTHING = "nothing"


def views_of(state: State, audit: Audit) -> Mapping[str, View]:
    """By auditor. Once one has come to something else, the border for the others is REFEREE_FRACTION of their limits."""
    views: dict[str, View] = {}
    for by in audit.auditors:
        first = next((each for each, view in views.items() if view is View.WRONG), None)
        answer = audit.answers.get(by)
        views[by] = View.NOTHING if answer is None else _view_of(state, audit, by, answer, first)
    return views


def refusals(state: State, audit: Audit) -> Mapping[str, list[str]]:
    """By node other than the audited one that did not hand out what the audit needs, the auditors that say so. Who cannot be
    reached is excused, unless it is of the audited node's own party."""
    party, of = party_of(state.ledger), audit.order.node
    found: dict[str, list[str]] = {}
    for by, answer in audit.answers.items():
        if answer is None or answer.withheld_by in ("", of):
            continue
        if not answer.unreachable or party(answer.withheld_by) == party(of):
            found.setdefault(answer.withheld_by, []).append(by)
    return found


def is_gross(state: State, audit: Audit, by: str) -> bool:
    """Whether this auditor found a larger error than honest devices may ever be apart. A smaller one may still be unusual."""
    answer, its = audit.answers.get(by), limits(state, audit.order, by)
    return answer is not None and exceeds(answer, {what: each.most for what, each in its.items()})


def _view_of(state: State, audit: Audit, by: str, answer: wire.Audited, first: str | None) -> View:
    """``first``: the auditor that came to something else before. If its error is unusual and not gross, a referee finds right
    only what is within REFEREE_FRACTION of the first's limits, too: one whose device is always further off cannot tell. In bf16
    addends may be left out: those of a bucket of norms alone depend on the number of threads (node/training/audit.py)."""
    its, strict = limits(state, audit.order, by), dict[str, float]()
    if first is None:
        border = {what: each.usual for what, each in its.items()}
    elif is_gross(state, audit, first):
        border = {what: REFEREE_FRACTION * each.most for what, each in its.items()}
    else:
        border = {what: REFEREE_FRACTION * each.usual for what, each in its.items()}
        strict = {what: REFEREE_FRACTION * each.usual for what, each in limits(state, audit.order, first).items()}
    if exceeds(answer, border):
        return View.WRONG
    if answer.withheld_by == audit.order.node:
        return View.WITHHELD
    compared = [what for what in its if what != "addends" or state.run.train.precision != "bf16"]
    incomplete = answer.problem or answer.withheld_by or any(getattr(answer, what) < 0 for what in compared)
    return View.NOTHING if incomplete or exceeds(answer, strict) else View.RIGHT

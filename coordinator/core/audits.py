"""Audits as values: what votes say was passed on, what was asked, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dtfm.protos import control_pb2 as wire

COMPARED = ("activations", "gradients", "addends", "losses")
"""What an audit compares, as in the fields of its answer (control.proto, Audited)."""

Hop = tuple[str, str, int, int, int]
"""Who sent a tensor to whom, its kind (frame.py), index and part."""


@dataclass(frozen=True, slots=True)
class Passed:
    """What a node votes to have sent, and to have got: a digest for each."""

    sent: Mapping[Hop, bytes]
    received: Mapping[Hop, bytes]


@dataclass(frozen=True, slots=True)
class Request:
    """An audit was asked for under this ``number``, and its answer is due ``until`` then."""

    number: int
    until: float


@dataclass(frozen=True, slots=True)
class Audit:
    """Work of the step in hand that others do again: ``order`` is what they are asked, without a number. ``auditors`` are to
    answer it, the first of them the one that was drawn; the others are asked once that one came to something else. ``requests``
    and ``answers`` are by auditor; None: no answer came."""

    order: wire.Audit
    auditors: tuple[str, ...]
    requests: Mapping[str, Request] = field(default_factory=dict)
    answers: Mapping[str, wire.Audited | None] = field(default_factory=dict)

    @property
    def awaited(self) -> Mapping[str, Request]:
        """The requests that are not answered yet."""
        return {node: request for node, request in self.requests.items() if node not in self.answers}


@dataclass(frozen=True, slots=True)
class Auditing:
    """What is remembered from audit to audit. ``number`` is the last request's. ``due``: by node whose work is audited in any
    case when it next takes part in a step (auditing.py, audit_next), in how many steps it was drawn for that."""

    number: int = 0
    due: Mapping[str, int] = field(default_factory=dict)

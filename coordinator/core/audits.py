"""Audits as values: the tensors that votes say were passed on, the requests, and the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dtfm.protos import control_pb2 as wire

COMPARED = ("activations", "gradients", "addends", "losses")
"""The quantities that an audit compares, named like the fields of its answer (control.proto, Audited)."""

Hop = tuple[str, str, int, int, int]
"""A tensor's sender and receiver, its kind (frame.py), index and part."""


@dataclass(frozen=True, slots=True)
class Passed:
    """The tensors that a node votes to have sent, and to have received, each with its digest."""

    sent: Mapping[Hop, bytes]
    received: Mapping[Hop, bytes]


@dataclass(frozen=True, slots=True)
class Request:
    """A request for an audit: its ``number``, and the time ``until`` which the answer is due."""

    number: int
    until: float


@dataclass(frozen=True, slots=True)
class Audit:
    """Work of the current step that others repeat. ``order``: the request without a number. ``auditors``: the nodes that are to
    answer, the drawn one first; the others are asked if the drawn one did not simply find the work right. ``requests`` and
    ``answers`` are by auditor; an answer of None: no answer came in time."""

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
    """What is remembered from audit to audit. ``number`` is the last request's. ``due``: the nodes that are audited in any case
    when they next take part in a step (auditing.py, audit_next), and in how many steps each was drawn for that."""

    number: int = 0
    due: Mapping[str, int] = field(default_factory=dict)

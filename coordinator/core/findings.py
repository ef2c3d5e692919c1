"""Findings of rooms: values with a reason. A room draws them from its own state and the incoming facts, and act.py carries them
out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.events import DigestMismatch


@dataclass(frozen=True, slots=True)
class Doubt:
    """One of the ``nodes`` is at fault, as in the event Suspected. ``by``: the accusers; empty: the coordinator has seen it."""

    charge: Charge
    nodes: tuple[str, ...]
    reason: str
    by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unwell:
    """``node`` does not work, for the reason ``why``. With a ``peer``: ``node`` says that it could not reach the peer. Nobody is
    guilty of that. ``problem``: as in StepAborted, or PLAN_FAILED."""

    node: str
    problem: str
    why: str
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Setback:
    """The current step, beginning of a plan or pause is given up because of a node, and tried again."""

    problem: str
    """Of a step: as in StepAborted."""
    node: str
    """The node that caused this."""
    reason: str
    """A sentence: why."""
    doubts: tuple[Doubt, ...] = ()
    """The suspicions that follow."""
    unwell: tuple[Unwell, ...] = ()
    """The nodes and pairs that plans leave out from now on."""
    proven: Charge | None = None
    """The charge that the node's own words prove; it is quarantined immediately. None: nothing is proven."""
    since: int | None = None
    """Work after this step is in doubt as well; None: no such work is."""
    unless_settled: bool = False
    """Whether ``since`` counts only if no node turns out to be guilty."""
    lost_state: bool = False
    """Whether the node is gone, or does not hold the state that it should, so that the same plan cannot go on."""
    mismatch: DigestMismatch | None = None
    """An event that goes into the log first, if there is one."""
    switches: bool = False
    """Whether the chosen plan takes over immediately."""


@dataclass(frozen=True, slots=True)
class Gone:
    """A node of the plan has left, for this ``reason``."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class OtherPrecision:
    """Before any training, the run is to compute in this ``precision``. ``by``: the node that needs it."""

    precision: str
    by: str


Finding = tuple[Doubt, ...] | Unwell | Setback | Gone | OtherPrecision
"""Doubts alone put nodes in doubt while the current work goes on. The work also goes on after an Unwell alone."""


def contradicting(charge: Charge, pairs: Iterable[tuple[str, str]], reason: str) -> tuple[Doubt, ...]:
    """The doubts about pairs of nodes whose statements cannot both be true."""
    return tuple(Doubt(charge, pair, reason, by=pair) for pair in pairs)

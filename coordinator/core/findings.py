"""What rooms find: values with a reason. Rooms find them by their own state and the incoming facts, and act.py carries them
out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.events import DigestMismatch


@dataclass(frozen=True, slots=True)
class Doubt:
    """One of the ``nodes`` is at fault, as in the event Suspected. ``by``: who says so; empty: the coordinator has seen it."""

    charge: Charge
    nodes: tuple[str, ...]
    reason: str
    by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unwell:
    """``node`` does not work, for this reason; or with a ``peer``, it says that it could not reach that one. Nobody is guilty of
    it. ``problem``: as in StepAborted, or PLAN_FAILED."""

    node: str
    problem: str
    why: str
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Setback:
    """The step, the beginning of a plan or the pause in hand is given up because of ``node``, for this ``reason``, and tried
    again. ``problem``: as in StepAborted, of a step.
    ``unwell``: what plans do without from now on. ``proven``: what the node has said proves it guilty of this, and it is
    quarantined at once. ``since``: what was done after this step is in doubt as well; None: nothing is. ``unless_settled``: that
    holds only if nobody turns out to be guilty. ``lost_state``: the node is gone, or does not hold what it should, so that the
    same plan cannot go on. ``mismatch``: goes into the log first. ``switches``: the plan that is chosen takes over at once."""

    problem: str
    node: str
    reason: str
    doubts: tuple[Doubt, ...] = ()
    unwell: tuple[Unwell, ...] = ()
    proven: Charge | None = None
    since: int | None = None
    unless_settled: bool = False
    lost_state: bool = False
    mismatch: DigestMismatch | None = None
    switches: bool = False


@dataclass(frozen=True, slots=True)
class Gone:
    """A node of the plan has left, for this ``reason``."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class OtherPrecision:
    """Nothing is trained, and the run is to compute in this ``precision``. ``by``: who wants it."""

    precision: str
    by: str


Finding = tuple[Doubt, ...] | Unwell | Setback | Gone | OtherPrecision
"""Doubts alone: somebody is in doubt, and the work in hand goes on. So it does where somebody is unwell alone."""


def contradicting(charge: Charge, pairs: Iterable[tuple[str, str]], reason: str) -> tuple[Doubt, ...]:
    """The doubts about pairs of nodes that say what cannot both be true."""
    return tuple(Doubt(charge, pair, reason, by=pair) for pair in pairs)

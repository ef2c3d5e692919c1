"""What the steps of an open run show of the FLOP/s that members claim.

A claim is *shown* as far as the member's share of a step could not have been computed in time otherwise, by the coordinator's own
clock: no vote can claim that. Nobody is asked for anything. That a member votes to be slower than it claims is for drift.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

from dtfm.coordinator.core.plan.drift import Part, parts_of
from dtfm.coordinator.core.plan.noise import WINDOW
from dtfm.coordinator.core.state import Speeds, State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.claims import MOST_TIMES_SHOWN, are_proven, believed_flops
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.members import planned_flops
from dtfm.protos import control_pb2 as wire

WORTH = 1.1
"""What a member has shown is logged if it makes that many times more of its claim count."""


def committed(transition: Transition, votes: Mapping[str, wire.StepReady]) -> None:
    """What a committed step, and those before it under this plan, show."""
    last = transition.state.ledger.training.last
    if not transition.state.ledger.is_open or last is None or last.resumed or last.seconds <= 0:
        return
    parts = parts_of(transition.state, votes)
    nodes = sorted(parts)
    claims = dict(zip(nodes, planned_flops(transition.state.ledger, nodes), strict=True))
    speeds = dict(transition.state.speeds)
    shown: dict[str, float] = {}
    for node, usual in _delivered_by_others(transition.state, parts, claims).items():
        took = ("", node)  # no link comes from nobody
        recent = (*speeds.get(took, Speeds()).recent, parts[node].work / last.seconds / usual)[-WINDOW:]
        speeds[took] = Speeds(recent)
        if len(recent) == WINDOW:
            shown[node] = min(statistics.median(recent), claims[node])
    transition.state = replace(transition.state, speeds=speeds)
    for node, believed in zip(nodes, believed_flops(transition.state.ledger, nodes), strict=True):
        if believed < claims[node] and MOST_TIMES_SHOWN * shown.get(node, 0.0) > WORTH * believed:
            transition.emit(ev.DeviceShown(node, shown[node]))


def _delivered_by_others(state: State, parts: Mapping[str, Part], claims: Mapping[str, float]) -> dict[str, float]:
    """By node, what others have delivered of their FLOP/s in this step, as a fraction.

    It is the median of the proven ones, or of all if nobody is proven: of two at least, so that no single one can make others
    look slow; but one that is proven is enough for those who are not.
    """
    of = {node: part.work / part.seconds / claims[node] for node, part in parts.items()}
    proven = {node for node, yes in zip(of, are_proven(state.ledger, tuple(of)), strict=True) if yes}
    usual = {}
    for node in sorted(of):
        others = [of[other] for other in (proven or of.keys()) - {node}]
        if len(others) >= (1 if proven and node not in proven else 2):
            usual[node] = statistics.median_low(others)
    return usual

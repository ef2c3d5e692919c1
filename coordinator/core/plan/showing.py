"""What the steps of an open run show about the FLOP/s that members claim.

A claim is *shown* as far as the member's share of a step could otherwise not have been computed in time. The coordinator's own
clock decides, which no vote can change. Nobody is asked for anything. Votes that are slower than a claim are for drift.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

from dtfm.coordinator.core.plan.drift import Part, parts_of
from dtfm.coordinator.core.plan.noise import WINDOW
from dtfm.coordinator.core.state.measured import Speeds
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.claims import MOST_TIMES_SHOWN, are_proven, believed_flops
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.members import planned_flops
from dtfm.protos import control_pb2 as wire

WORTH = 1.1
"""The shown speed of a member is logged if it makes this many times more of its claim count."""


def committed(transition: Transition, votes: Mapping[str, wire.StepReady]) -> None:
    """Takes what this committed step shows, together with earlier steps under this plan."""
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
    """By node, the fraction of their FLOP/s that others have delivered in this step.

    It is the median of proven nodes, or of all if nobody is proven. At least two nodes are needed, so that no single node can
    make others look slow. For an unproven node, one proven node is enough.
    """
    of = {node: part.work / part.seconds / claims[node] for node, part in parts.items()}
    proven = {node for node, yes in zip(of, are_proven(state.ledger, tuple(of)), strict=True) if yes}
    usual = {}
    for node in sorted(of):
        others = [of[other] for other in (proven or of.keys()) - {node}]
        if len(others) >= (1 if proven and node not in proven else 2):
            usual[node] = statistics.median_low(others)
    return usual

"""What the steps of an open run show of the FLOP/s that members claim.

A claim is *disproved* if a member delivers less of it than others deliver of theirs, by the times that they vote. It is *shown*
as far as the member's share of a step could not have been computed in time otherwise, by the coordinator's own clock: no vote
can claim that. Nobody is asked for anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dtfm.coordinator.core.plan.drift import LEAST_SECONDS, WINDOW, compare
from dtfm.coordinator.core.state import Speeds, State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.claims import MOST_TIMES_SHOWN, are_proven, believed_flops
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.memory import Checkpointing, Keeping

WORTH = 1.1
"""What a member has shown is logged if it makes that many times more of its claim count."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A node's share of a step, in FLOPs, and the seconds of computing that it votes."""

    work: float
    seconds: float


def committed(transition: Transition, votes: Mapping[str, wire.StepReady]) -> None:
    """What a committed step, and those before it under this plan, show."""
    last = transition.state.ledger.training.last
    if not transition.state.ledger.is_open or last is None or last.resumed or last.seconds <= 0:
        return
    parts = _parts(transition.state, votes)
    speeds = dict(transition.state.speeds)
    disproved: dict[str, float] = {}
    shown: dict[str, float] = {}
    for node, usual in _delivered_by_others(transition.state, parts).items():
        part, claimed = parts[node], transition.state.ledger.members[node].device.flops
        delivers, claim = part.work / part.seconds / claimed / usual, (node, node)  # no link goes from a node to itself
        known = speeds.get(claim, Speeds(first=1.0))
        speeds[claim], ratio = compare(known, min(delivers, 1.0), transition.now, transition.state.lease)
        if ratio is not None:
            speeds[claim] = Speeds(first=1.0)
            disproved[node] = ratio
        took = ("", node)  # nor from nobody
        recent = (*speeds.get(took, Speeds()).recent, part.work / last.seconds / usual)[-WINDOW:]
        speeds[took] = Speeds(recent)
        if len(recent) == WINDOW:
            shown[node] = min(statistics.median(recent), claimed)
    transition.state = replace(transition.state, speeds=speeds)
    nodes = sorted(parts)
    for node, believed in zip(nodes, believed_flops(transition.state.ledger, nodes), strict=True):
        claimed = transition.state.ledger.members[node].device.flops
        if (ratio := disproved.get(node)) is not None:
            reason = (
                f"in training it delivers {1 / ratio:.1f} times less than it claims, by what others deliver of theirs"
            )
            transition.emit(ev.DeviceDrifted(node, max(claimed * ratio, 1.0), reason))
        elif believed < claimed and MOST_TIMES_SHOWN * shown.get(node, 0.0) > WORTH * believed:
            transition.emit(ev.DeviceShown(node, shown[node]))


def _parts(state: State, votes: Mapping[str, wire.StepReady]) -> dict[str, _Part]:
    """By node of the plan that has computed for long enough."""
    plan, described = state.ledger.training.plan, state.ledger.described
    if plan is None or described is None:
        return {}
    parts = {}
    for stage in plan.stages:
        forward = sum(layer.forward_flops for layer in described.workload.layers[slice(*stage.layers)])
        keeping = stage.keeping or (Keeping(),) * len(stage.replicas)
        for node, load, kept in zip(stage.replicas, stage.loads, keeping, strict=True):
            vote = votes.get(node)
            if vote is not None and node in state.ledger.members and load and vote.compute_seconds >= LEAST_SECONDS:
                passes = 4 if kept.checkpointing is Checkpointing.LAYER else 3
                parts[node] = _Part(passes * forward * load, vote.compute_seconds)
    return parts


def _delivered_by_others(state: State, parts: Mapping[str, _Part]) -> dict[str, float]:
    """By node, what others have delivered of their FLOP/s in this step, as a fraction.

    It is the median of the proven ones, or of all if nobody is proven: of two at least, so that no single one can make others
    look slow; but one that is proven is enough for those who are not.
    """
    of = {node: part.work / part.seconds / state.ledger.members[node].device.flops for node, part in parts.items()}
    proven = {node for node, yes in zip(of, are_proven(state.ledger, tuple(of)), strict=True) if yes}
    usual = {}
    for node in sorted(of):
        others = [of[other] for other in (proven or of.keys()) - {node}]
        if len(others) >= (1 if proven and node not in proven else 2):
            usual[node] = statistics.median_low(others)
    return usual

"""What a member says of its device and its links, and what of that counts before it is shown.

In an open run anybody may claim to be the fastest, to be given most of the model. So claims count only as far as proven members,
most others, or steps (plan/showing.py) make them plausible; and once some are proven, others are given less than they could do,
more with each audit that finds their work right.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dtfm.coordinator.core.trust.disputes import disputed
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.members import planned_flops
from dtfm.coordinator.log.standing import PROVEN_AFTER, Standing, earned, standing_of

MOST_TIMES_SHOWN = 2.0
"""A claim counts for at most so many times what the node, or a proven one, has shown."""
OUTLIER = 10.0
"""Where nobody is proven, a device that claims more than so many times the median counts as the median."""


def are_proven(ledger: Ledger, nodes: Sequence[str]) -> NDArray[np.bool_]:
    """Of each node, whether it is."""
    return np.array([standing_of(ledger, node) >= Standing.PROVEN for node in nodes], dtype=np.bool_)


def witnesses(ledger: Ledger, nodes: Sequence[str]) -> NDArray[np.bool_]:
    """Of each node, whether it may answer for a stage, as each stage of a plan has one that does, if these could train alone:
    whether it is proven, in dispute with nobody of its standing, and no gradient norm that its party alone says was bounded.

    While such nodes are fewer than stages, and some are in dispute or were bounded, whether it is none of these. So no stage is
    left to two who agreed against a third: whoever sees them next is a voice of its own.
    """
    plan, proven = ledger.training.plan, are_proven(ledger, nodes)
    at_odds = disputed(ledger) | ledger.trust.bounded.keys()
    undisputed = np.array([ledger.party(node) not in at_odds for node in nodes], dtype=np.bool_)
    enough = np.count_nonzero(proven & undisputed) >= (1 if plan is None else len(plan.stages))
    return proven & undisputed if enough or not at_odds else undisputed


def shown_by(ledger: Ledger, nodes: Sequence[str]) -> frozenset[tuple[str, int]]:
    """What planning depends on, by node: how many audits have found its work right, PROVEN_AFTER only if it is proven; -1 if it
    is suspected, -2 if a norm that its party alone says was bounded. Where members know each other, only of such nodes."""
    strangers, of = ledger.is_open, ledger.trust.audits
    made = []
    for node in nodes:
        standing, audits = standing_of(ledger, node), of.get(ledger.party(node))
        so_far = 0 if audits is None else min(audits.clean, PROVEN_AFTER - 1)
        if ledger.party(node) in ledger.trust.bounded:
            made.append((node, -2))
        elif standing is Standing.SUSPECTED:
            made.append((node, -1))
        elif strangers:
            made.append((node, PROVEN_AFTER if standing >= Standing.PROVEN else so_far))
    return frozenset(made)


def counted_flops(ledger: Ledger, nodes: Sequence[str]) -> list[float]:
    """By node, the FLOP/s with which it is planned: of those that are believed, in an open run half at first for who is not
    proven, once anybody is, and more with each audit. Not less: an idle node could show nothing."""
    believed = believed_flops(ledger, nodes)
    if not ledger.is_open:
        return believed
    its = [earned(ledger, node) for node in nodes]
    if not any(each.standing >= Standing.PROVEN for each in its):
        return believed
    return [
        flops * (PROVEN_AFTER + min(each.audits, PROVEN_AFTER - 1)) / (2 * PROVEN_AFTER)
        if each.standing < Standing.PROVEN
        else flops
        for flops, each in zip(believed, its, strict=True)
    ]


def believed_flops(ledger: Ledger, nodes: Sequence[str]) -> list[float]:
    """By node, what of its `planned_flops`, which rest on its word, is believed: all, where members know each other.

    Else at most MOST_TIMES_SHOWN times the fastest proven one of its kind of device that is another party's. Where there is none,
    all that is not more than OUTLIER times the median of its kind, or of all if it is the only one; what is more counts as that
    median. In any case MOST_TIMES_SHOWN times what the node has shown itself (Member.shown). Audits show that work is right, and
    not how fast it is done: so this holds for proven ones as well.
    """
    members = [ledger.members[node] for node in nodes]
    claimed = planned_flops(ledger, nodes)
    if not ledger.is_open:
        return claimed
    by_kind: dict[str, list[float]] = {}
    fastest: dict[str, dict[str, float]] = {}  # by kind, then by party
    party = [ledger.party(node) for node in nodes]
    for member, flops, who, proven in zip(members, claimed, party, are_proven(ledger, nodes), strict=True):
        kind = member.device.kind
        by_kind.setdefault(kind, []).append(flops)
        if proven:
            of = fastest.setdefault(kind, {})
            of[who] = max(flops, of.get(who, 0.0))
    median = {kind: statistics.median_low(of if len(of) > 1 else claimed) for kind, of in by_kind.items()}
    two_fastest = {kind: heapq.nlargest(2, of.items(), key=lambda each: each[1]) for kind, of in fastest.items()}
    believed = []
    for member, flops, who in zip(members, claimed, party, strict=True):
        kind = member.device.kind
        other = next((speed for each, speed in two_fastest.get(kind, ()) if each != who), None)
        plausible = flops if flops <= OUTLIER * median[kind] else median[kind]
        most = plausible if other is None else MOST_TIMES_SHOWN * other
        believed.append(min(flops, max(most, MOST_TIMES_SHOWN * member.shown)))
    return believed


def counted_bandwidth(ledger: Ledger, nodes: Sequence[str], bandwidth: NDArray[np.float64]) -> NDArray[np.float64]:
    """The bytes per second with which links are planned, float64 [nodes, nodes] as ``bandwidth``, which may be NaN.

    In an open run links of members that are not proven count for at most MOST_TIMES_SHOWN times the fastest one between proven
    members, where these have measured any.
    """
    proven = are_proven(ledger, nodes)
    if not ledger.is_open or proven.all():
        return bandwidth
    both = proven[:, None] & proven[None, :]
    most = np.nan_to_num(bandwidth[both]).max(initial=0.0)
    return np.where(both, bandwidth, np.minimum(bandwidth, MOST_TIMES_SHOWN * most)) if most > 0 else bandwidth

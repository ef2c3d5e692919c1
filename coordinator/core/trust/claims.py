"""The speeds that members claim for devices and links, and how much of a claim counts before the member has shown it.

In an open run a stranger may claim to be the fastest in order to get most of the model. So claims count only as far as proven
members, most other members, or steps (plan/showing.py) make them plausible. When some members are proven, others are planned with
less than they could do, and with more after each audit that finds their work right.
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
"""A claim counts for at most this many times the speed that the node, or a proven node, has shown."""
OUTLIER = 10.0
"""If nobody is proven, a device that claims more than this many times the median counts as the median."""


def are_proven(ledger: Ledger, nodes: Sequence[str]) -> NDArray[np.bool_]:
    """Whether each node is proven."""
    return np.array([standing_of(ledger, node) >= Standing.PROVEN for node in nodes], dtype=np.bool_)


def witnesses(ledger: Ledger, nodes: Sequence[str]) -> NDArray[np.bool_]:
    """Whether each node may be the one that answers for a stage. Each stage of a plan has such a node, if they could train alone.

    Such a node is proven, in dispute with no node of at least its standing, and no norm that its party alone says was bounded. If
    fewer nodes than stages meet this, and some are in dispute or were bounded, every node without dispute or bound may answer. So
    no stage is left to two parties that agreed against a third: the party that meets them next is another voice.
    """
    plan, proven = ledger.training.plan, are_proven(ledger, nodes)
    at_odds = disputed(ledger) | ledger.trust.bounded.keys()
    undisputed = np.array([ledger.party(node) not in at_odds for node in nodes], dtype=np.bool_)
    enough = np.count_nonzero(proven & undisputed) >= (1 if plan is None else len(plan.stages))
    return proven & undisputed if enough or not at_odds else undisputed


def shown_by(ledger: Ledger, nodes: Sequence[str]) -> frozenset[tuple[str, int]]:
    """What a plan depends on besides speeds, as pairs of node and number. The number of audits that found the node's work right,
    PROVEN_AFTER only if it is proven; -1 if it is suspected; -2 if a norm was bounded that its party alone says. If members know
    each other, only the negative ones are given."""
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
    """By node, the FLOP/s that it is planned with. In an open run with proven nodes, others count with half of the believed
    speed at first, and with more after each audit. Not with less, since an idle node could show nothing."""
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
    """By node, how much of its `planned_flops` is believed. These rest on its word. If members know each other, all of it is.

    In an open run, at most MOST_TIMES_SHOWN times the speed of the fastest proven device of the same kind, of another party. If
    there is none, a speed of at most OUTLIER times the median is believed, and a higher one counts as the median. The median is
    taken of its kind of device, or of all if no other is of its kind. In any case MOST_TIMES_SHOWN times the node's own shown
    speed (Member.shown) is believed. Audits show that work is right, not how fast it is: so proven nodes are treated alike.
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
    """The bytes per second that links are planned with, as float64 [nodes, nodes] like ``bandwidth``, which may be NaN.

    In an open run links of members that are not proven count for at most MOST_TIMES_SHOWN times the fastest one between proven
    members, where these have measured any.
    """
    proven = are_proven(ledger, nodes)
    if not ledger.is_open or proven.all():
        return bandwidth
    both = proven[:, None] & proven[None, :]
    most = np.nan_to_num(bandwidth[both]).max(initial=0.0)
    return np.where(both, bandwidth, np.minimum(bandwidth, MOST_TIMES_SHOWN * most)) if most > 0 else bandwidth

"""What a member says of its device and its links, and what of that counts before it is shown.

In an open run anybody may claim to be the fastest, to be given most of the model. So the claims of members that are not proven
count only as far as proven ones, or most others, make them plausible; and once some are proven, others are given less than they
could do, more with each audit that finds their work right.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.standing import PROVEN_AFTER, Standing, earned, is_open

MOST_TIMES_PROVEN = 2.0
"""A claim counts for at most so many times the most that proven ones show."""
OUTLIER = 10.0
"""Where nobody is proven, a device that claims more than so many times the median counts as the median."""


def are_proven(ledger: Ledger, nodes: Sequence[str]) -> NDArray[np.bool_]:
    """Of each node, whether it is."""
    return np.array([earned(ledger, node).standing is Standing.PROVEN for node in nodes], dtype=np.bool_)


def shown_by(ledger: Ledger, nodes: Sequence[str]) -> frozenset[tuple[str, int]]:
    """What planning depends on, by node: how many audits have found its work right; PROVEN_AFTER if it is proven, -1 if it is
    suspected. Empty where members know each other and nothing is audited."""
    if not is_open(ledger.run) and not ledger.audits:
        return frozenset()
    made = []
    for node in nodes:
        its = earned(ledger, node)
        audits = {Standing.PROVEN: PROVEN_AFTER, Standing.SUSPECTED: -1}.get(its.standing, its.audits)
        made.append((node, audits))
    return frozenset(made)


def counted_flops(ledger: Ledger, nodes: Sequence[str]) -> list[float]:
    """By node, the FLOP/s with which it is planned: in an open run not always what it claims, if it is not proven.

    Where some of its kind of device are proven, it counts for at most MOST_TIMES_PROVEN times the fastest of these. Else, if it
    claims more than OUTLIER times the median of its kind, or of all if it is the only one, it counts as that median. And once
    anybody is proven, half of that counts, and more with each audit: an idle one could show nothing.
    """
    devices = [ledger.members[node].device for node in nodes]
    claimed = [device.flops for device in devices]
    if not is_open(ledger.run):
        return claimed
    its = [earned(ledger, node) for node in nodes]
    fastest: dict[str, float] = {}
    by_kind: dict[str, list[float]] = {}
    for device, each in zip(devices, its, strict=True):
        by_kind.setdefault(device.kind, []).append(device.flops)
        if each.standing is Standing.PROVEN:
            fastest[device.kind] = max(device.flops, fastest.get(device.kind, 0.0))
    counted = []
    for device, each in zip(devices, its, strict=True):
        flops, others = device.flops, by_kind[device.kind]
        if each.standing is not Standing.PROVEN:
            median = statistics.median_low(others if len(others) > 1 else claimed)
            if device.kind in fastest:
                flops = min(flops, MOST_TIMES_PROVEN * fastest[device.kind])
            elif flops > OUTLIER * median:
                flops = median
            if fastest:
                flops *= (PROVEN_AFTER + min(each.audits, PROVEN_AFTER - 1)) / (2 * PROVEN_AFTER)
        counted.append(flops)
    return counted


def counted_bandwidth(ledger: Ledger, nodes: Sequence[str], bandwidth: NDArray[np.float64]) -> NDArray[np.float64]:
    """The bytes per second with which links are planned, float64 [nodes, nodes] as ``bandwidth``, which may be NaN.

    In an open run links of members that are not proven count for at most MOST_TIMES_PROVEN times the fastest one between proven
    members, where these have measured any.
    """
    proven = are_proven(ledger, nodes)
    if not is_open(ledger.run) or proven.all():
        return bandwidth
    both = proven[:, None] & proven[None, :]
    most = np.nan_to_num(bandwidth[both]).max(initial=0.0)
    return np.where(both, bandwidth, np.minimum(bandwidth, MOST_TIMES_PROVEN * most)) if most > 0 else bandwidth

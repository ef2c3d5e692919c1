"""The planner's input: the cluster, as the nodes measured it, and how long a plan is expected to stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dtfm.coordinator.core.reach.machines import machines_of
from dtfm.coordinator.core.trust.claims import counted_bandwidth, counted_flops, witnesses
from dtfm.coordinator.core.trust.disputes import disputes
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.reach import Carried
from dtfm.coordinator.log.training import MOST_LOSSES
from dtfm.scheduler.model.cluster import Cluster, Line, Node
from dtfm.scheduler.model.decision import HORIZON_SECONDS

DEFAULT_LATENCY_SECONDS = 0.02
DEFAULT_BANDWIDTH = 12.5e6
"""Bytes per second, as of a 100 Mbit/s connection. Both defaults apply while no link has been measured."""

ROUNDING = 1e-9


def measured_cluster(ledger: Ledger, nodes: Sequence[str]) -> Cluster:
    """The nodes in the order given, with their measured links as far as they count (trust/claims.py). A link without a
    measurement gets the median of the others. Pairs in dispute have no link. Nodes of one machine share its line."""
    size = len(nodes)
    latency, bandwidth = np.full((size, size), np.nan), np.full((size, size), np.nan)
    places = {node: place for place, node in enumerate(nodes)}
    for source, i in places.items():
        for destination, link in ledger.reach.links.get(source, {}).items():
            if (j := places.get(destination)) is not None:
                latency[i, j], bandwidth[i, j] = link.latency_seconds, link.bandwidth
    bandwidth = counted_bandwidth(ledger, nodes, bandwidth)
    reached = np.nan_to_num(bandwidth) > 0
    _fill(latency, latency[reached], DEFAULT_LATENCY_SECONDS)
    _fill(bandwidth, bandwidth[reached], DEFAULT_BANDWIDTH)
    for one, other in disputes(ledger):
        if one in places and other in places:
            bandwidth[places[one], places[other]] = bandwidth[places[other], places[one]] = 0.0
    members = [ledger.members[node] for node in nodes]
    machines = machines_of(ledger, nodes)
    machine_of = {node: machine for machine, on_it in enumerate(machines) for node in on_it}
    between = _between(machines, bandwidth)
    carried = [_carried(ledger, [nodes[node] for node in on_it]) for on_it in machines]
    ups = _connections([up for up, _ in carried], between)
    downs = _connections([down for _, down in carried], between.T)
    shared = {
        machine: Line(
            f"the machine of {nodes[on_it[0]]}",
            float(ups[machine] or between[machine].max() or DEFAULT_BANDWIDTH),
            float(downs[machine] or between[:, machine].max() or DEFAULT_BANDWIDTH),
        )
        for machine, on_it in enumerate(machines)
        if len(on_it) > 1
    }
    speeds, marks = counted_flops(ledger, nodes), witnesses(ledger, nodes)
    relays, via = _relays(ledger, places, bandwidth)
    return Cluster(
        tuple(
            Node(
                name,
                flops,
                member.device.memory_bytes,
                up=ups[machine],
                down=downs[machine],
                host_memory_bytes=member.device.host_memory_bytes or None,
                proven=bool(proven),
                line=shared[machine].id if machine in shared else "",
            )
            for name, member, flops, proven, (_, machine) in zip(
                nodes, members, speeds, marks, sorted(machine_of.items()), strict=True
            )
        ),
        latency,
        bandwidth,
        lines=(*relays, *shared.values()),
        via=via,
    )


def horizon_seconds(losses: Sequence[int], step: int, left: int, step_seconds: float | None) -> float:
    """Expected seconds until the plan loses a node, or until the run ends.

    ``losses``: see Training. ``step``: the last committed step. ``left``: the number of steps to come. ``step_seconds``: the
    time of a step; None: not known. A run counts as if it had seen one loss in HORIZON_SECONDS before it began. If fewer than
    MOST_LOSSES are known, these are all losses since the run began.
    """
    if step_seconds is None:
        return HORIZON_SECONDS
    since, *later = losses if len(losses) == MOST_LOSSES else (0, *losses)
    usual = (HORIZON_SECONDS + max(0, step - since) * step_seconds) / (1 + len(later))
    return max(1.0, min(usual, left * step_seconds))


def _relays(
    ledger: Ledger, places: Mapping[str, int], links: NDArray[np.float64]
) -> tuple[tuple[Line, ...], NDArray[np.int64]]:
    """The lines of relays that are no nodes of the cluster, and which relay carries which link: see Cluster.via.

    A relay without a measured line counts as its fastest link.
    """
    by = {
        (places[source], places[destination]): way.relay
        for source in places
        for destination, way in ledger.reach.ways.get(source, {}).items()
        if way.relay and destination in places
    }
    others = sorted(set(by.values()) - places.keys())
    numbers = {**places, **{relay: len(places) + number for number, relay in enumerate(others)}}
    via = np.full((len(places), len(places)), -1)
    passed = dict.fromkeys(others, 1.0)
    for (i, j), relay in by.items():
        via[i, j] = numbers[relay]
        if relay in passed:
            passed[relay] = max(passed[relay], float(links[i, j]))
    made = []
    for relay in others:
        each = ledger.reach.carried.get(relay, (None, None))
        made.append(Line(relay, *(max(passed[relay], 0.0 if one is None else one.bandwidth) for one in each)))
    return tuple(made), via


def _between(machines: Sequence[Sequence[int]], links: NDArray[np.float64]) -> NDArray[np.float64]:
    """From each machine to each other machine, the fastest of the nodes' ``links``; 0 within a machine."""
    order = [node for machine in machines for node in machine]
    starts = np.cumsum([0, *(len(machine) for machine in machines[:-1])])
    between = np.maximum.reduceat(np.maximum.reduceat(links[np.ix_(order, order)], starts, axis=0), starts, axis=1)
    np.fill_diagonal(between, 0.0)
    return between


def _carried(ledger: Ledger, nodes: Sequence[str]) -> list[Carried | None]:
    """The bandwidth of this machine's line up and down, from the best measurement of these nodes. An exact measurement is better
    than a lower bound."""
    known = [ledger.reach.carried[node] for node in nodes if node in ledger.reach.carried]
    return [
        max((one for each in known if (one := each[way])), key=lambda one: (not one.least, one.bandwidth), default=None)
        for way in range(2)
    ]


def _connections(measured: Sequence[Carried | None], links: NDArray[np.float64]) -> list[float | None]:
    """Bytes per second that each machine's line carries. ``links[i]``: the links of machine i. None: no machine has measured.

    A connection carries at least its fastest link, and it does not matter if it carries more than all its links. Connections are
    compared by how many times their fastest link they carry. For some this is known, for others only a lower bound: they did not
    slow down the links that were measured together, and the first nodes had few links or none. Such a connection counts as the
    median of the connections that carry at least as much. Lower bounds among these are treated like patients who leave a study
    early (Kaplan and Meier, 1958).
    """
    if not any(measured):
        return [None] * len(measured)
    fastest, whole = links.max(axis=1), links.sum(axis=1)
    carried = np.array([0.0 if each is None else each.bandwidth for each in measured])
    exact = np.array([each is not None and not each.least for each in measured])
    times = np.divide(carried, fastest, out=np.zeros_like(carried), where=fastest > 0)
    order = np.lexsort((~exact, times))
    left = np.cumprod(1.0 - exact[order] / np.arange(len(order), 0, -1))  # the share of connections that carry more
    left_after = np.empty_like(left)
    left_after[order] = left
    half = np.searchsorted(-left, -left_after / 2 - ROUNDING)
    median = np.append(times[order], np.inf)[half]
    with np.errstate(invalid="ignore"):  # inf * 0, for a node without links
        usual = np.where(exact, carried, np.fmin(median * fastest, whole))
    return [float(each) if each > 0 else None for each in np.maximum(usual, np.maximum(fastest, carried))]


def _fill(matrix: NDArray[np.float64], known: NDArray[np.float64], default: float) -> None:
    matrix[np.isnan(matrix)] = float(np.median(known)) if known.size else default
    np.fill_diagonal(matrix, 0.0)

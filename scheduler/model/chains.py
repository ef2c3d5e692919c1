"""Which micro-batch travels along which chain of nodes: a pure function of the plan, which the coordinator, the scheduler's
simulation and every node share.

Micro-batches are numbered from 0 within a step, and nodes compute lower numbers first. So what a node sends or receives is
spread evenly over its links and over the step: after any number of micro-batches, every flow and every load is about equally
far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dtfm.scheduler.model.plan import Flow, Plan, from_routes

Ints = NDArray[np.int64]

LOOKED = 4
"""The most held-out micro-batches on which an island tries each outer step."""

REMEMBERED = 8
"""Number of plans whose chains are remembered: those in force, chosen and asked about."""


def places(loads: Ints, flows: Sequence[Ints]) -> Ints:
    """For each micro-batch and stage, the micro-batch's place in the stage's group: int64 [micro-batches, stages].

    ``loads`` [senders] are the first stage's loads. ``flows`` has for each boundary the micro-batches on each link, int64
    [senders, receivers], with sums that fit. Micro-batches choose in order of number. From sender u, each goes to a receiver v
    with room on the link. It takes the v with the least ``(sent[u, v] + 0.5) / flow[u, v] + (received[v] + 0.5) / load[v]``,
    the first of equals.
    """
    result = np.empty((int(loads.sum()), len(flows) + 1), dtype=np.int64)
    result[:, 0] = dealt(loads)
    for boundary, counts in enumerate(flows):
        result[:, boundary + 1] = _onward(result[:, boundary], counts)
    return result


def dealt(counts: Ints) -> Ints:
    """The receivers that one sender sends to, in turn: each ``v`` comes ``counts[v]`` times.

    Follows the rule of `places`, computed in one pass: a receiver's keys grow, so their order is the order of the choices.
    """
    receivers = np.repeat(np.arange(len(counts)), counts)
    sent = np.arange(len(receivers)) - np.repeat(np.cumsum(counts) - counts, counts)
    share = (sent + 0.5) / counts[receivers]
    return np.asarray(receivers[np.lexsort((receivers, share + share))], dtype=np.int64)


def _onward(at: Ints, counts: Ints) -> Ints:
    """The receivers of micro-batches that are ``at`` these senders; ``counts`` is int64 [senders, receivers]."""
    senders, receivers = counts.shape
    if senders == 1:
        return dealt(counts[0])
    if receivers == 1:
        return np.zeros_like(at)
    loads: list[int] = counts.sum(axis=0).tolist()
    received = [0] * receivers
    filled = [0.5 / load if load else 0.0 for load in loads]
    flows: list[dict[int, int]] = [{} for _ in range(senders)]
    for u, v in np.argwhere(counts).tolist():
        flows[u][v] = int(counts[u, v])
    sent = [dict.fromkeys(row, 0) for row in flows]
    used = [{v: 0.5 / flow for v, flow in row.items()} for row in flows]  # of links with room, by receiver ascending
    result = []
    for u in at.tolist():
        row = used[u]
        v = min(row, key=lambda v: row[v] + filled[v])
        result.append(v)
        sent[u][v] += 1
        received[v] += 1
        filled[v] = (received[v] + 0.5) / loads[v]
        if sent[u][v] < flows[u][v]:
            row[v] = (sent[u][v] + 0.5) / flows[u][v]
        else:
            del row[v]
    return np.array(result, dtype=np.int64)


@lru_cache(REMEMBERED)
def chains(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """By micro-batch, the nodes that compute it, one per stage of their island. The islands' micro-batches follow each other. The
    plan must be valid (plan.check)."""
    return tuple(chain for island in plan.islands for chain in _chains_of(island))


def _chains_of(plan: Plan) -> tuple[tuple[str, ...], ...]:
    seats = [plan.seats(stage) for stage in range(len(plan.stages))]
    loads = np.array(list(seats[0].values()), dtype=np.int64)
    flows = [flow_matrix(flows, list(a), list(b)) for flows, a, b in zip(plan.flows, seats, seats[1:], strict=False)]
    names = [list(nodes) for nodes in seats]
    columns = [
        [nodes[place] for place in column] for nodes, column in zip(names, places(loads, flows).T.tolist(), strict=True)
    ]
    for takeover in plan.takeovers:
        column = columns[takeover.stage]
        numbers = [number for number, node in enumerate(column) if node == takeover.node]
        heirs = dealt(np.array([count for _, count in takeover.heirs], dtype=np.int64)).tolist()
        for number, heir in zip(numbers, heirs, strict=True):
            column[number] = takeover.heirs[heir][0]
    return tuple(zip(*columns, strict=True))


@lru_cache(REMEMBERED)
def micro_batches_of(plan: Plan) -> Mapping[str, tuple[int, ...]]:
    """By node of the plan, the micro-batches that it computes, ascending."""
    numbers: dict[str, list[int]] = {node: [] for node in plan.nodes}
    for number, chain in enumerate(chains(plan)):
        for node in chain:
            numbers[node].append(number)
    return {node: tuple(mine) for node, mine in numbers.items()}


def looked_at(plan: Plan) -> Mapping[int, tuple[int, ...]]:
    """By island, the micro-batches of a step along whose chains it sends held-out samples when it tries outer steps."""
    return {island: tuple(places[:LOOKED]) for island, places in plan.places.items()}


def held_out_chains(plan: Plan, micro_batches: int, *, twice: bool = False) -> tuple[tuple[str, ...], ...]:
    """By held-out micro-batch, the nodes that compute it: the training micro-batches' chains in turn.

    Neighbours in number are spread evenly over all nodes: every second micro-batch, for example, might otherwise always pass
    the same one of two replicas.

    ``twice``: if the last stage has several replicas, the list is repeated, as numbers ``micro_batches`` and up. The repeated
    micro-batch travels a chain that ends at another node, so that the results of both ends can be compared. Its chain is the
    next among the chains that share the fewest nodes with the first one.
    """
    training = chains(plan)
    once = tuple(training[number % len(training)] for number in range(micro_batches))
    if not twice or len({chain[-1] for chain in training}) == 1:
        return once
    return *once, *(_other_chain(training, number % len(training)) for number in range(micro_batches))


def _other_chain(training: Sequence[tuple[str, ...]], number: int) -> tuple[str, ...]:
    mine, after = training[number], (*training[number + 1 :], *training[:number])
    others = (chain for chain in after if chain[-1] != mine[-1])
    return min(others, key=lambda chain: len({*chain} & {*mine}))


def settled(plan: Plan) -> Plan:
    """The plan with the same loads and links but without takeovers, for a look ahead. Micro-batches get new numbers."""
    if not plan.takeovers:
        return plan
    counted = Counter(chains(plan))
    return from_routes(plan.generation, plan.stages, list(counted.items()), plan.idle)


def flow_matrix(flows: Sequence[Flow], senders: Sequence[str], receivers: Sequence[str]) -> Ints:
    """The micro-batches on each link: int64 [senders, receivers]."""
    rows, columns = ({node: place for place, node in enumerate(nodes)} for nodes in (senders, receivers))
    matrix = np.zeros((len(rows), len(columns)), dtype=np.int64)
    for flow in flows:
        matrix[rows[flow.sender], columns[flow.receiver]] = flow.micro_batches
    return matrix

"""Networks too large for matrices: links are given per pair of classes, and planning works on a small version."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from dtfm.scheduler.cost.bounds import work_bound
from dtfm.scheduler.model.chains import chains
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.decision import Decision
from dtfm.scheduler.model.plan import Flow, Plan, Stage, validate
from dtfm.scheduler.model.workload import Workload

DENSE = 1024
"""Largest number of nodes of a compact network that is planned with a matrix entry per pair of nodes."""
MINIATURE = 384
"""Approximate number of nodes of a miniature."""


@dataclass(frozen=True, slots=True, eq=False)
class CompactCluster:
    """Nodes in classes: all links from class a to class b are the same.

    ``class_of`` is int64 [nodes]. ``latency`` (seconds) and ``bandwidth`` (bytes per second) are float64 [classes, classes];
    their diagonals are the links between two nodes of one class, which must reach each other. A node's ``up`` and ``down``
    limit what it sends and receives in total. Raises ValueError for a duplicate name or an impossible number.
    """

    nodes: tuple[Node, ...]
    classes: tuple[str, ...]
    class_of: NDArray[np.int64]
    latency: NDArray[np.float64]
    bandwidth: NDArray[np.float64]

    def __post_init__(self) -> None:
        for what, names in (("classes", self.classes), ("nodes", tuple(node.id for node in self.nodes))):
            if len(set(names)) < len(names):
                twice = Counter(names).most_common(1)[0][0]
                raise ValueError(f"{what}: {twice!r} appears more than once; names must differ")
        for name, within in zip(self.classes, self.bandwidth.diagonal(), strict=True):
            if within == 0:
                raise ValueError(
                    f"bandwidth within class {name!r} is 0; nodes that cannot reach each other need classes of their own"
                )

    def of(self, numbers: list[int], copies: int = 1) -> Cluster:
        """The cluster of the nodes ``numbers``, each standing for ``copies`` nodes."""
        kinds = self.class_of[numbers]
        index = np.ix_(kinds, kinds)
        return Cluster(
            tuple(self.nodes[number] for number in numbers), self.latency[index], self.bandwidth[index], copies=copies
        )


@dataclass(frozen=True, slots=True, eq=False)
class Miniature:
    """A small cluster, each node of which stands for ``copies`` similar ones, with 1/``copies`` of the micro-batches.

    ``bundles[i]`` are the ids that node i stands for, its own first. Nodes in no bundle stay idle: fewer than
    ``copies`` left over in a class, or more than the micro-batches can feed.
    """

    cluster: Cluster
    workload: Workload
    bundles: tuple[tuple[str, ...], ...]
    whole: CompactCluster
    whole_workload: Workload

    def expand(self, decision: Decision) -> Decision:
        """The decision's plan with every bundle's nodes in place. Predicted seconds remain the miniature's."""
        plan = decision.plan
        assert not plan.takeovers  # without an incumbent there are none
        bundle = {members[0]: members for members in self.bundles}
        copies = self.cluster.copies
        more = self.whole_workload.micro_batches - copies * self.workload.micro_batches
        longer = set(chains(plan)[0])  # one chain of some copies takes what cannot be divided
        stages = tuple(
            Stage(
                stage.layers,
                tuple(member for node in stage.replicas for member in bundle[node]),
                tuple(
                    load + (node in longer and copy < more)
                    for node, load in zip(stage.replicas, stage.loads, strict=True)
                    for copy in range(copies)
                ),
                tuple(number for number in stage.in_flight for copy in range(copies)),
                tuple(way for way in stage.keeping for copy in range(copies)),
            )
            for stage in plan.stages
        )
        flows = tuple(
            tuple(
                Flow(bundle[sender][copy], bundle[flow.receiver][copy], flow.micro_batches + extra)
                for sender, same in groupby(boundary, key=lambda flow: flow.sender)
                for mine in [list(same)]
                for copy in range(copies)
                for flow in mine
                for extra in [{sender, flow.receiver} <= longer and copy < more]
            )
            for boundary in plan.flows
        )
        used = {node for stage in stages for node in stage.replicas}
        idle = tuple(node.id for node in self.whole.nodes if node.id not in used)
        expanded = Plan(plan.generation, stages, flows, idle)
        validate(expanded, {node.id for node in self.whole.nodes}, self.whole_workload)
        flops = np.array([node.flops for node in self.whole.nodes])
        sentence = f"Planned in miniature: each node stands for {copies} similar ones. {decision.sentence}"
        return replace(
            decision, plan=expanded, sentence=sentence, lower_bound_seconds=work_bound(self.whole_workload, flops)
        )


def shrink(whole: CompactCluster, workload: Workload) -> Miniature:
    """The miniature of a cluster: nodes of a class are bundled by speed, and a bundle is as good as its weakest node, and
    proven if any of its nodes is.

    Raises ValueError when no class is large enough for a bundle.
    """
    copies = max(1, min(math.ceil(len(whole.nodes) / MINIATURE), workload.micro_batches // 8))
    of_class: dict[int, list[int]] = defaultdict(list)
    for number in sorted(range(len(whole.nodes)), key=lambda number: (-whole.nodes[number].flops, number)):
        of_class[int(whole.class_of[number])].append(number)
    bundles = [
        members[first : first + copies]
        for members in of_class.values()
        for first in range(0, len(members) - copies + 1, copies)
    ]
    if not bundles:
        raise ValueError(
            f"no class has {copies} nodes; a network of {len(whole.nodes)} needs larger classes, or matrices per node"
        )
    # With fewer micro-batches than nodes, the slowest nodes would have none.
    bundles = sorted(sorted(bundles, key=lambda bundle: -whole.nodes[bundle[-1]].flops)[:DENSE])
    cluster = whole.of([bundle[0] for bundle in bundles], copies)
    weakest = tuple(_weakest([whole.nodes[number] for number in bundle]) for bundle in bundles)
    return Miniature(
        replace(cluster, nodes=weakest),
        replace(workload, micro_batches=workload.micro_batches // copies),
        tuple(tuple(whole.nodes[number].id for number in bundle) for bundle in bundles),
        whole,
        workload,
    )


def _weakest(nodes: list[Node]) -> Node:
    up = [node.up for node in nodes if node.up is not None]
    down = [node.down for node in nodes if node.down is not None]
    hosts = [node.host_memory_bytes for node in nodes if node.host_memory_bytes is not None]
    return replace(
        nodes[0],
        flops=min(node.flops for node in nodes),
        memory_bytes=min(node.memory_bytes for node in nodes),
        up=min(up, default=None),
        down=min(down, default=None),
        host_memory_bytes=min(hosts) if len(hosts) == len(nodes) else None,
        proven=any(node.proven for node in nodes),
    )

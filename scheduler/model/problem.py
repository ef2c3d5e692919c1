"""A cluster and a workload as arrays, with nodes and layers by number: the input of all searches and cost functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtfm.scheduler.model.chains import chains, flow_matrix, settled
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.memory import LADDER, Checkpointing, Keeping
from dtfm.scheduler.model.plan import Flow, Plan, Stage, unless_usual
from dtfm.scheduler.model.workload import UPDATE_BYTES, Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Records = NDArray[np.void]
"""Of a structured dtype."""
Groups = tuple[tuple[int, ...], ...]
"""Node numbers per stage, in pipeline order."""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A cluster and a workload as arrays, in seconds, bytes and FLOP/s.

    Vectors are [nodes] or [layers], matrices [nodes, nodes], for the link from i to j. ``*_before[k]`` is the sum over layers
    [0, k): the sum over layers [a, b) is ``before[b] - before[a]``.
    """

    cluster: Cluster
    workload: Workload
    flops: Floats = field(init=False)
    memory: Floats = field(init=False)
    host_memory: Floats = field(init=False)
    """0 where the device computes in the host's own memory."""
    proven: NDArray[np.bool_] = field(init=False)
    """Node.proven."""
    up: Floats = field(init=False)
    """Bytes per second out of the node's line."""
    down: Floats = field(init=False)
    """Bytes per second into the node's line."""
    latency: Floats = field(init=False)
    bandwidth: Floats = field(init=False)
    """The link's bytes per second; 0 on the diagonal."""
    slowness: Floats = field(init=False)
    """Seconds per byte of a tensor over the link; infinite if j cannot be reached from i."""
    via: Ints = field(init=False)
    """The line of the relay between i and j. -1 if there is no relay, or if the relay is on the machine of i or j."""
    line: Ints = field(init=False)
    """Cluster.line."""
    flops_before: Floats = field(init=False)
    parameters_before: Floats = field(init=False)
    reduced_before: Floats = field(init=False)
    """Bytes of gradients, and of Muon's updates, that replicas reduce, as the workload's codec leaves them: the bytes to multiply
    with `slowness`."""
    frozen_before: Floats = field(init=False)
    orthogonal_before: Floats = field(init=False)
    kept_before: Floats = field(init=False)
    inputs_before: Floats = field(init=False)
    activation: Floats = field(init=False)
    """Bytes that are sent of a layer's output, as the workload's codec leaves them: the bytes to multiply with `slowness`."""

    def __post_init__(self) -> None:
        nodes, layers = self.cluster.nodes, self.workload.layers
        bandwidth = self.cluster.bandwidth.astype(np.float64)
        np.fill_diagonal(bandwidth, np.inf)
        latency = self.cluster.latency.astype(np.float64)
        np.fill_diagonal(latency, 0.0)
        with np.errstate(divide="ignore"):
            slowness = 1.0 / bandwidth
        np.fill_diagonal(bandwidth, 0.0)
        line, via = self.cluster.line, np.full(latency.shape, -1)
        if self.cluster.via is not None:
            rows = np.append(line, len(line) + np.arange(len(self.cluster.lines)))
            via = np.where(self.cluster.via >= 0, rows[self.cluster.via], -1)
            via[(via == line) | (via == line[:, None]) | (line == line[:, None])] = -1
        known_up, known_down = self.cluster.carries
        values = {
            "flops": np.array([node.flops for node in nodes], dtype=np.float64),
            "memory": np.array([node.memory_bytes for node in nodes], dtype=np.float64),
            "host_memory": np.array([node.host_memory_bytes or 0.0 for node in nodes], dtype=np.float64),
            "proven": np.array([node.proven for node in nodes], dtype=np.bool_),
            "up": np.where(np.isnan(known_up), bandwidth.max(axis=1), known_up),
            "down": np.where(np.isnan(known_down), bandwidth.max(axis=0), known_down),
            "latency": latency,
            "bandwidth": bandwidth,
            "slowness": slowness,
            "via": via,
            "line": line,
            "flops_before": _before([layer.forward_flops for layer in layers]),
            "parameters_before": _before([layer.parameter_bytes for layer in layers]),
            "reduced_before": _before(
                [
                    layer.parameter_bytes * self.workload.sent_per_reduced_byte
                    + layer.orthogonal_bytes * UPDATE_BYTES / 2  # they are gathered, and not scattered before
                    for layer in layers
                ]
            ),
            "orthogonal_before": _before([layer.orthogonal_bytes for layer in layers]),
            "frozen_before": _before([layer.frozen_bytes for layer in layers]),
            "kept_before": _before([layer.kept for layer in layers]),
            "inputs_before": _before([0.0, *(layer.activation_bytes for layer in layers[:-1])]),
            "activation": np.array([layer.activation_bytes for layer in layers], dtype=np.float64)
            * self.workload.sent_per_activation_byte,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def is_mixed(self) -> bool:
        """Whether some nodes are proven and others are not: then each stage needs a proven one."""
        return bool(self.proven.any() and not self.proven.all())

    @property
    def least_kept_before(self) -> Floats:
        """The least bytes that a micro-batch in flight needs in any way that the workload allows, summed like `kept_before`."""
        if self.workload.checkpointing is None:
            return _before(np.minimum(np.diff(self.kept_before), np.diff(self.inputs_before)).tolist())
        return self.kept_before if self.workload.checkpointing is Checkpointing.NONE else self.inputs_before

    def exchange(self, size: float) -> Floats:
        """Seconds to send ``size`` bytes from each node to each other one and the same number back: [nodes, nodes]."""
        latency, slowness = self.latency + self.latency.T, self.slowness + self.slowness.T
        return np.where(np.isinf(slowness), np.inf, latency) if size == 0 else latency + size * slowness

    def paper_exchanges(self) -> Floats:
        """`exchange` for both sizes of PaperCosts.exchanged, float64 [2, nodes, nodes]. Two nodes of a group exchange shards of
        their gradients. Two nodes of neighbouring stages exchange a pipeline's activations. Zero on the diagonal, infinite
        without a link."""
        assert self.workload.paper is not None
        made = np.stack([self.exchange(size) for size in self.workload.paper.exchanged])
        diagonal = np.arange(made.shape[1])
        made[:, diagonal, diagonal] = 0.0
        return made


class Draft(NamedTuple):
    """A plan by numbers, in arrays that compiled functions take. A seat is a node's place in the plan; the seats of a stage are
    neighbours, in order of the stages."""

    node: Ints
    """[seats]: the node's number."""
    load: Ints
    """[seats]: micro-batches of a step."""
    first: Ints
    """[stages + 1]: stage s has the seats [first[s], first[s + 1])."""
    cut: Ints
    """[stages + 1]: stage s has the layers [cut[s], cut[s + 1])."""
    flow: Ints
    """The micro-batches on links: a matrix [senders, receivers] per boundary, one after another, row by row."""
    flow_at: Ints
    """[stages]: where each boundary's matrix begins in ``flow``, and last the end of the last matrix."""
    way: Ints
    """[seats]: the node's way of memory.LADDER, by place; -1: model/keeping.py chooses."""

    @classmethod
    def of(
        cls,
        groups: Groups,
        cuts: tuple[int, ...],
        loads: Sequence[Ints] = (),
        flows: Sequence[Ints] = (),
        keeping: Sequence[Sequence[Keeping]] = (),
    ) -> Draft:
        """The draft with these loads and flows, none of each by default. Without ``keeping``, every way is -1."""
        nodes = [node for group in groups for node in group]
        ways = [LADDER.index(way) for ways in keeping for way in ways]
        return cls(
            node=np.array(nodes, dtype=np.int64),
            load=np.concatenate([np.empty(0, dtype=np.int64), *loads], dtype=np.int64),
            first=np.cumsum([0, *(len(group) for group in groups)], dtype=np.int64),
            cut=np.array(cuts, dtype=np.int64),
            flow=np.concatenate([np.empty(0, dtype=np.int64), *(flow.ravel() for flow in flows)], dtype=np.int64),
            flow_at=np.cumsum([0, *(flow.size for flow in flows)], dtype=np.int64),
            way=np.array(ways or [-1] * len(nodes), dtype=np.int64),
        )

    @property
    def groups(self) -> Groups:
        nodes = self.node.tolist()
        return tuple(tuple(nodes[begin:end]) for begin, end in pairwise(self.first.tolist()))

    @property
    def cuts(self) -> tuple[int, ...]:
        return tuple(self.cut.tolist())

    @property
    def loads(self) -> list[Ints]:
        """By stage, the micro-batches of each node."""
        return np.split(self.load, self.first[1:-1])

    @property
    def flows(self) -> list[Ints]:
        """By boundary, the micro-batches on each link: int64 [senders, receivers]."""
        shapes = pairwise(np.diff(self.first).tolist())
        return [
            flow.reshape(shape) for flow, shape in zip(np.split(self.flow, self.flow_at[1:-1]), shapes, strict=False)
        ]

    def plan(
        self,
        cluster: Cluster,
        in_flight: Iterable[tuple[int, ...]],
        keeping: Iterable[tuple[Keeping, ...]],
        generation: int,
    ) -> Plan:
        """The plan with names; ``in_flight`` (in_flight.depths) and ``keeping`` (keeping.keepings) have an entry per stage and
        replica."""
        ids = cluster.ids
        used = set(self.node.tolist())
        return Plan(
            generation=generation,
            stages=tuple(
                Stage(
                    (first, past_last),
                    tuple(ids[node] for node in group),
                    tuple(loads.tolist()),
                    held,
                    unless_usual(ways),
                )
                for (first, past_last), group, loads, held, ways in zip(
                    pairwise(self.cuts), self.groups, self.loads, in_flight, keeping, strict=True
                )
            ),
            flows=tuple(
                tuple(
                    Flow(ids[a[row]], ids[b[column]], int(counts[row, column])) for row, column in np.argwhere(counts)
                )
                for counts, (a, b) in zip(self.flows, pairwise(self.groups), strict=True)
            ),
            idle=tuple(name for node, name in enumerate(ids) if node not in used),
        )


def draft_of(plan: Plan, cluster: Cluster) -> Draft:
    """The plan by numbers, with the changes of its takeovers. Raises KeyError if the plan names a node that the cluster lacks."""
    number = {name: index for index, name in enumerate(cluster.ids)}
    now = settled(plan)
    return Draft.of(
        groups=tuple(tuple(number[node] for node in stage.replicas) for stage in now.stages),
        cuts=(0, *(stage.layers[1] for stage in now.stages)),
        loads=[np.array(stage.loads) for stage in now.stages],
        flows=[
            flow_matrix(flows, before.replicas, after.replicas)
            for flows, (before, after) in zip(now.flows, pairwise(now.stages), strict=True)
        ],
        keeping=[stage.keeping or (Keeping(),) * len(stage.replicas) for stage in now.stages],
    )


def problem_of(island: Plan, cluster: Cluster, workload: Workload) -> Problem:
    """What one island of a plan computes, on its own nodes."""
    number = {name: index for index, name in enumerate(cluster.ids)}
    own = cluster.only([number[node] for node in island.nodes])
    return Problem(own, replace(workload, micro_batches=len(chains(island))))


def _before(values: list[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])

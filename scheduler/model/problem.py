"""A cluster and a workload as arrays, with nodes and layers by number: the input of all searches and cost functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dtfm.scheduler.model.chains import flow_matrix, places, settled
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.memory import Checkpointing, Keeping
from dtfm.scheduler.model.plan import Flow, Plan, Stage, unless_usual
from dtfm.scheduler.model.workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Records = NDArray[np.void]
"""Of a structured dtype."""
Groups = tuple[tuple[int, ...], ...]
"""Node numbers per stage, in pipeline order."""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """The arrays, in seconds, bytes and FLOP/s.

    ``slowness[i, j]`` is the seconds per byte of a tensor over the link, its codec included, and infinite where j cannot be
    reached from i. ``ratio[i, j]`` is the codec's bytes per byte. ``bandwidth[i, j]`` is the link's bytes per second (0 on the
    diagonal). ``via`` is Cluster.via. ``own_slowness[i]`` is the slowness among the nodes that node i stands for, 0 when it
    stands for itself alone. ``host_memory[i]`` is 0 where the device computes in the host's own memory. ``proven[i]`` is
    Node.proven.

    ``*_before[k]`` is the sum over layers [0, k): the sum over layers [a, b) is ``before[b] - before[a]``.
    """

    cluster: Cluster
    workload: Workload
    flops: Floats = field(init=False)
    memory: Floats = field(init=False)
    host_memory: Floats = field(init=False)
    proven: NDArray[np.bool_] = field(init=False)
    up: Floats = field(init=False)
    down: Floats = field(init=False)
    latency: Floats = field(init=False)
    bandwidth: Floats = field(init=False)
    slowness: Floats = field(init=False)
    ratio: Floats = field(init=False)
    via: Ints = field(init=False)
    own_slowness: Floats = field(init=False)
    flops_before: Floats = field(init=False)
    parameters_before: Floats = field(init=False)
    kept_before: Floats = field(init=False)
    inputs_before: Floats = field(init=False)
    activation: Floats = field(init=False)

    def __post_init__(self) -> None:
        nodes, layers = self.cluster.nodes, self.workload.layers
        bandwidth = self.cluster.bandwidth.astype(np.float64)
        if self.cluster.copies == 1:
            np.fill_diagonal(bandwidth, np.inf)
        latency = self.cluster.latency.astype(np.float64)
        np.fill_diagonal(latency, 0.0)
        given = self.cluster.ratio
        ratio = np.broadcast_to(1.0, latency.shape) if given is None else given.astype(np.float64)
        with np.errstate(divide="ignore"):
            slowness = ratio / bandwidth
        own_slowness = slowness.diagonal().copy()
        own_bandwidth = np.where(np.isinf(bandwidth.diagonal()), 0.0, bandwidth.diagonal())
        np.fill_diagonal(slowness, 0.0)
        np.fill_diagonal(bandwidth, 0.0)
        known_up = np.array([np.nan if node.up is None else node.up for node in nodes])
        known_down = np.array([np.nan if node.down is None else node.down for node in nodes])
        values = {
            "flops": np.array([node.flops for node in nodes], dtype=np.float64),
            "memory": np.array([node.memory_bytes for node in nodes], dtype=np.float64),
            "host_memory": np.array([node.host_memory_bytes or 0.0 for node in nodes], dtype=np.float64),
            "proven": np.array([node.proven for node in nodes], dtype=np.bool_),
            "up": np.where(np.isnan(known_up), np.maximum(bandwidth.max(axis=1), own_bandwidth), known_up),
            "down": np.where(np.isnan(known_down), np.maximum(bandwidth.max(axis=0), own_bandwidth), known_down),
            "latency": latency,
            "bandwidth": bandwidth,
            "slowness": slowness,
            "ratio": ratio,
            "via": np.full(latency.shape, -1) if self.cluster.via is None else self.cluster.via.astype(np.int64),
            "own_slowness": own_slowness,
            "flops_before": _before([layer.forward_flops for layer in layers]),
            "parameters_before": _before([layer.parameter_bytes for layer in layers]),
            "kept_before": _before([layer.kept for layer in layers]),
            "inputs_before": _before([0.0, *(layer.activation_bytes for layer in layers[:-1])]),
            "activation": np.array([layer.activation_bytes for layer in layers], dtype=np.float64),
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

    def exchange(self, senders: Ints, receivers: Ints, size: float) -> Floats:
        """Seconds to send ``size`` bytes from each sender and the same number back: [senders, receivers]."""
        there, back = np.ix_(senders, receivers), np.ix_(receivers, senders)
        latency = self.latency[there] + self.latency[back].T
        if size == 0:
            unreachable = np.isinf(self.slowness[there]) | np.isinf(self.slowness[back].T)
            return np.where(unreachable, np.inf, latency)
        return np.asarray(latency + size * (self.slowness[there] + self.slowness[back].T))


@dataclass(frozen=True, eq=False)
class Draft:
    """A plan by numbers. Stage s has layers [cuts[s], cuts[s + 1]) on the nodes groups[s].

    ``loads[s]`` is int64 [len(groups[s])], the micro-batches of each node; ``flows[s]`` is int64 [len(groups[s]),
    len(groups[s + 1])], the micro-batches on each link to the next stage. ``keeping`` says how each node keeps what it needs, by
    stage and replica; None leaves that to model/keeping.py.
    """

    groups: Groups
    cuts: tuple[int, ...]
    loads: tuple[Ints, ...]
    flows: tuple[Ints, ...]
    keeping: tuple[tuple[Keeping, ...], ...] | None = None

    @cached_property
    def chains(self) -> Ints:
        """By micro-batch, the nodes that compute it: int64 [micro-batches, stages]."""
        at = places(self.loads[0], self.flows)
        return np.column_stack([np.array(group)[column] for group, column in zip(self.groups, at.T, strict=True)])

    @cached_property
    def routes(self) -> tuple[Ints, Ints]:
        """The different chains, int64 [routes, stages], and the number of micro-batches of each, int64 [routes]."""
        routes, index = np.unique(self.chains, axis=0, return_inverse=True)
        return routes, np.bincount(index.ravel())

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
        used = {node for group in self.groups for node in group}
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
                for first, past_last, group, loads, held, ways in zip(
                    self.cuts[:-1], self.cuts[1:], self.groups, self.loads, in_flight, keeping, strict=True
                )
            ),
            flows=tuple(
                tuple(
                    Flow(ids[a[row]], ids[b[column]], int(counts[row, column])) for row, column in np.argwhere(counts)
                )
                for counts, a, b in zip(self.flows, self.groups, self.groups[1:], strict=False)
            ),
            idle=tuple(name for node, name in enumerate(ids) if node not in used),
        )


def draft_of(plan: Plan, cluster: Cluster) -> Draft:
    """The plan by numbers, with what its takeovers changed. Raises KeyError when it names a node that the cluster lacks."""
    number = {name: index for index, name in enumerate(cluster.ids)}
    now = settled(plan)
    return Draft(
        groups=tuple(tuple(number[node] for node in stage.replicas) for stage in now.stages),
        cuts=(0, *(stage.layers[1] for stage in now.stages)),
        loads=tuple(np.array(stage.loads, dtype=np.int64) for stage in now.stages),
        flows=tuple(
            flow_matrix(flows, before.replicas, after.replicas)
            for flows, before, after in zip(now.flows, now.stages, now.stages[1:], strict=False)
        ),
        keeping=tuple(stage.keeping or (Keeping(),) * len(stage.replicas) for stage in now.stages),
    )


def _before(values: list[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])

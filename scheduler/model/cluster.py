"""The nodes and the links between them, as measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Node:
    """One device that can compute. Raises ValueError for a number that is not finite and above 0."""

    id: str
    flops: float
    """Sustained FLOP/s."""
    memory_bytes: float
    """Memory available to weights, gradients, optimizer state and activations together."""
    region: str = ""
    up: float | None = None
    """The most that the node sends to all peers together, in bytes per second. None: as much as its fastest link."""
    down: float | None = None
    """The most that the node receives from all peers together, in bytes per second. None: as much as its fastest link."""
    host_memory_bytes: float | None = None
    """The host's memory, for optimizer state alone. None: the device computes in the host's memory."""
    proven: bool = True
    """If some nodes are proven and others are not, each stage has a proven one wherever possible."""
    line: str = ""
    """The Cluster.lines entry that the node shares with others of its machine, instead of ``up`` and ``down``. Empty: a line of
    its own."""

    def __post_init__(self) -> None:
        _check_positive(self, f"node {self.id!r}", "flops", "memory_bytes", "up", "down", "host_memory_bytes")


@dataclass(frozen=True, slots=True)
class Line:
    """The connection of a relay, or of a machine with several nodes, to all others: the bytes per second out (``up``) and in
    (``down``). Traffic between nodes of the machine does not pass the line.

    Raises ValueError for a number that is not finite and above 0.
    """

    id: str
    up: float
    down: float

    def __post_init__(self) -> None:
        _check_positive(self, f"line {self.id!r}", "up", "down")


def _check_positive(of: Node | Line, which: str, *fields: str) -> None:
    for field in fields:
        value = getattr(of, field)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{which}: {field} is {value}; it must be a finite number above 0")


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """Nodes and the directed links between them. Matrices are [len(nodes), len(nodes)]: entry [i, j] is from ``nodes[i]`` to
    ``nodes[j]``.

    Raises ValueError for a wrong shape, a duplicate id or an impossible number.
    """

    nodes: tuple[Node, ...]
    latency: NDArray[np.float64]
    """One-way, in seconds. The diagonal is ignored."""
    bandwidth: NDArray[np.float64]
    """Bytes per second, 0 if j cannot be reached from i. The diagonal is ignored."""
    lines: tuple[Line, ...] = ()
    via: NDArray[np.int64] | None = None
    """The relay between i and j: the number of a node, or len(nodes) plus the number of a line; -1 where the link is direct.
    All traffic over a relay shares the relay's line. None: all links are direct."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("nodes is empty; a cluster needs at least one")
        ids = [*(node.id for node in self.nodes), *(line.id for line in self.lines)]
        if len(set(ids)) < len(ids):
            twice = next(name for name in ids if ids.count(name) > 1)
            raise ValueError(f"nodes: the id {twice!r} appears more than once; ids must differ")
        for node in self.nodes:
            if node.line and node.line not in ids[len(self.nodes) :]:
                raise ValueError(f"node {node.id!r}: line is {node.line!r}; it must be one of the cluster's lines")
        shape = (len(self.nodes), len(self.nodes))
        for name in ("latency", "bandwidth", "via"):
            matrix = getattr(self, name)
            if matrix is not None and matrix.shape != shape:
                raise ValueError(f"{name} has shape {matrix.shape}; {len(self.nodes)} nodes need {shape}")
        for name in ("latency", "bandwidth"):
            matrix = getattr(self, name)
            wrong = ~(np.isfinite(matrix) & (matrix >= 0))
            np.fill_diagonal(wrong, False)
            if wrong.any():
                i, j = (int(index) for index in np.argwhere(wrong)[0])
                raise ValueError(
                    f"{name} from {ids[i]!r} to {ids[j]!r} is {matrix[i, j]}; it must be a finite number, 0 or above"
                )

        via = np.empty((0, 0), np.int64) if self.via is None else self.via
        for i, j in np.argwhere(via >= 0).tolist():
            if via[i, j] >= len(ids) or via[i, j] in (i, j):
                raise ValueError(
                    f"via from {ids[i]!r} to {ids[j]!r} is {via[i, j]}; it must be the number of another node, or of a "
                    f"line from {len(self.nodes)} to {len(ids) - 1}, or -1"
                )

    def only(self, nodes: Sequence[int]) -> Cluster:
        """The nodes of these numbers, in this order, and the links between them. A link that a missing node relays counts as
        direct."""
        if list(nodes) == list(range(len(self.nodes))):
            return self
        grid = np.ix_(nodes, nodes)
        via = None
        if self.via is not None:
            new = np.full(len(self.nodes) + len(self.lines) + 1, -1, dtype=np.int64)  # the last one is for -1
            new[list(nodes)] = np.arange(len(nodes))
            new[len(self.nodes) : -1] = len(nodes) + np.arange(len(self.lines))
            via = new[self.via[grid]]
        return Cluster(
            tuple(self.nodes[number] for number in nodes),
            self.latency[grid],
            self.bandwidth[grid],
            self.lines,
            via,
        )

    def without_marks(self) -> Cluster:
        """The cluster as if all its nodes were proven."""
        return replace(self, nodes=tuple(replace(node, proven=True) for node in self.nodes))

    @property
    def line(self) -> NDArray[np.int64]:
        """By node, whose line it is on: its own number, or len(nodes) plus the number of one of ``lines``. int64 [nodes]."""
        shared = {line.id: len(self.nodes) + number for number, line in enumerate(self.lines)}
        return np.array([shared.get(node.line, number) for number, node in enumerate(self.nodes)], dtype=np.int64)

    @property
    def carries(self) -> NDArray[np.float64]:
        """What each node's line carries up and down, NaN if unknown: float64 [2, nodes]."""
        rows = (*self.nodes, *self.lines)
        return np.array([(rows[row].up, rows[row].down) for row in self.line], dtype=np.float64).T  # None becomes NaN

    def on_lines(self, sent: NDArray[np.float64]) -> NDArray[np.float64]:
        """The bytes that each node's line sends and receives: float64 [2, nodes]. ``sent``, float64 [nodes, nodes], is the
        traffic."""
        line, crossing = self.line, self.crossing(sent)
        return np.array([np.bincount(line, crossing.sum(axis=axis))[line] for axis in (1, 0)], dtype=np.float64)

    def crossing(self, links: NDArray[np.float64]) -> NDArray[np.float64]:
        """What ``links``, float64 [nodes, nodes], carry over lines: 0 between nodes on one line, since their traffic does not
        pass it."""
        line = self.line
        return np.where(line[:, None] == line, 0.0, links)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(node.id for node in self.nodes)

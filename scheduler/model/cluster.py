"""The nodes and the links between them, as measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Node:
    """One device that can compute.

    ``flops`` is its sustained FLOP/s. ``memory_bytes`` is the memory available to weights, gradients, optimizer state and
    activations together. ``up`` and ``down`` limit what it sends to and receives from all peers together, in bytes per second;
    None means as much as its fastest link. Raises ValueError for a number that is not finite and above 0.
    """

    id: str
    flops: float
    memory_bytes: float
    region: str = ""
    up: float | None = None
    down: float | None = None

    def __post_init__(self) -> None:
        for field in ("flops", "memory_bytes", "up", "down"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"node {self.id!r}: {field} is {value}; it must be a finite number above 0")


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """Nodes and the directed links between them.

    ``latency[i, j]`` is the one-way latency from ``nodes[i]`` to ``nodes[j]`` in seconds, ``bandwidth[i, j]`` the bandwidth in
    bytes per second, 0 where j cannot be reached from i. ``ratio[i, j]`` is the number of bytes that the link's codec sends
    per byte of activations or gradients; None means that they are sent uncompressed. State is always transferred uncompressed.
    All three are float64 of shape [len(nodes), len(nodes)], and their diagonals are ignored.

    With ``copies`` above 1 each node stands for that number of similar nodes, and the diagonals are the links among them: see
    compact.Miniature. Raises ValueError for a wrong shape, a duplicate id or an impossible number.
    """

    nodes: tuple[Node, ...]
    latency: NDArray[np.float64]
    bandwidth: NDArray[np.float64]
    ratio: NDArray[np.float64] | None = None
    copies: int = 1

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("nodes is empty; a cluster needs at least one")
        ids = [node.id for node in self.nodes]
        if len(set(ids)) < len(ids):
            twice = next(name for name in ids if ids.count(name) > 1)
            raise ValueError(f"nodes: the id {twice!r} appears more than once; ids must differ")
        for name in ("latency", "bandwidth", "ratio"):
            matrix = getattr(self, name)
            if matrix is None:
                continue
            if matrix.shape != (len(ids), len(ids)):
                raise ValueError(f"{name} has shape {matrix.shape}; {len(ids)} nodes need {(len(ids), len(ids))}")
            wrong = ~(np.isfinite(matrix) & ((matrix > 0) if name == "ratio" else (matrix >= 0)))
            np.fill_diagonal(wrong, False)
            if wrong.any():
                i, j = (int(index) for index in np.argwhere(wrong)[0])
                least = "above 0" if name == "ratio" else "0 or above"
                raise ValueError(
                    f"{name} from {ids[i]!r} to {ids[j]!r} is {matrix[i, j]}; it must be a finite number, {least}"
                )

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(node.id for node in self.nodes)

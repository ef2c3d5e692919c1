"""The machines and the links between them, as measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Node:
    """One device that could compute.

    ``flops`` is its sustained FLOP/s, ``memory_bytes`` what it can give to weights, gradients, optimizer state and
    activations together.
    """

    id: str
    flops: float
    memory_bytes: float
    region: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """Nodes and the directed links between them.

    ``latency[i, j]`` is in seconds one way from ``nodes[i]`` to ``nodes[j]``, ``bandwidth[i, j]`` in bytes per second; both
    are float64 of shape [len(nodes), len(nodes)]. Bandwidth 0 means that j cannot be reached from i. Diagonals are not
    read.
    """

    nodes: tuple[Node, ...]
    latency: NDArray[np.float64]
    bandwidth: NDArray[np.float64]

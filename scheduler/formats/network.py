"""NETWORK.json: a cluster."""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel, TypeAdapter

from dtfm.scheduler.formats.fields import read_document
from dtfm.scheduler.model.cluster import Cluster, Line, Node
from dtfm.scheduler.model.problem import Floats

BYTES_PER_GIGABIT = 1e9 / 8
"""Converts Gbit/s to bytes per second."""


class _Node(BaseModel, extra="forbid"):
    id: str
    flops: float
    memory_bytes: float
    region: str = ""
    up_gbps: float | None = None
    down_gbps: float | None = None
    host_memory_bytes: float | None = None
    proven: bool = True
    line: str = ""


class _Line(BaseModel, extra="forbid"):
    id: str
    up_gbps: float
    down_gbps: float


class _Network(BaseModel, extra="forbid"):
    nodes: list[_Node]
    latency_ms: list[list[float]]
    bandwidth_gbps: list[list[float]]
    lines: list[_Line] = []


_ADAPTER = TypeAdapter(_Network)


def parse_network(text: str) -> Cluster:
    """A cluster from NETWORK.json: ``{"nodes": [{"id", "region", "flops", "memory_bytes"}], "latency_ms", "bandwidth_gbps"}``.

    Matrices are one way: row = source, column = destination. Optional keys of a node are ``region``, ``up_gbps``, ``down_gbps``
    and ``host_memory_bytes``. The latter is the host's memory, for optimizer state; without it the device computes in the
    host's own memory. ``"proven": false`` marks a node whose work nobody has checked yet (default true): each stage has a
    proven node, if there are any.

    Nodes of a machine share its connection to others. They name it as their ``line``, one of ``"lines": [{"id", "up_gbps",
    "down_gbps"}]``. A node without a line or limits is as fast as its fastest link.
    """
    read = read_document(_ADAPTER, text)
    size = len(read.nodes)
    return Cluster(
        tuple(
            Node(
                node.id,
                node.flops,
                node.memory_bytes,
                node.region,
                None if node.up_gbps is None else node.up_gbps * BYTES_PER_GIGABIT,
                None if node.down_gbps is None else node.down_gbps * BYTES_PER_GIGABIT,
                node.host_memory_bytes,
                node.proven,
                node.line,
            )
            for node in read.nodes
        ),
        _matrix("latency_ms", read.latency_ms, size) / 1e3,
        _matrix("bandwidth_gbps", read.bandwidth_gbps, size) * BYTES_PER_GIGABIT,
        tuple(
            Line(line.id, line.up_gbps * BYTES_PER_GIGABIT, line.down_gbps * BYTES_PER_GIGABIT) for line in read.lines
        ),
    )


def _matrix(key: str, rows: list[list[float]], size: int) -> Floats:
    """A row and a column per node; the diagonal is ignored."""
    if len(rows) != size:
        raise ValueError(f"{key} has {len(rows)} rows; there are {size} nodes")
    for i, row in enumerate(rows):
        if len(row) != size:
            raise ValueError(f"{key}[{i}] has {len(row)} columns; there are {size} nodes")
    matrix = np.array(rows, dtype=np.float64).reshape(size, size)
    np.fill_diagonal(matrix, 0.0)
    return matrix

"""NETWORK.json: a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, TypeAdapter

from dtfm.scheduler.formats.fields import read_document
from dtfm.scheduler.model.cluster import Cluster, Node, Relay
from dtfm.scheduler.model.problem import Floats, Ints

Entry = TypeVar("Entry")

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


class _Relay(BaseModel, extra="forbid"):
    id: str
    up_gbps: float
    down_gbps: float


class _Network(BaseModel, extra="forbid"):
    nodes: list[_Node]
    latency_ms: list[list[float]]
    bandwidth_gbps: list[list[float]]
    relays: list[_Relay] = []
    via: list[list[str | None]] | None = None


_ADAPTER = TypeAdapter(_Network)


def parse_network(text: str) -> Cluster:
    """A cluster from NETWORK.json: ``{"nodes": [{"id", "region", "flops", "memory_bytes"}], "latency_ms", "bandwidth_gbps"}``.

    Matrices are one way: row = source, column = destination. ``region``, ``up_gbps``, ``down_gbps`` and
    ``host_memory_bytes`` are optional. ``host_memory_bytes`` are the host's, for optimizer state; without it the device
    computes in the host's own memory. ``"proven": false`` marks a node whose work nobody has checked yet (default true):
    where there are others, each stage has one of them.

    ``"via"``, optional too, has by link the id of the node or relay that passes everything on, or null. ``"relays": [{"id",
    "up_gbps", "down_gbps"}]`` are those that are no nodes.
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
            )
            for node in read.nodes
        ),
        _matrix("latency_ms", read.latency_ms, size) / 1e3,
        _matrix("bandwidth_gbps", read.bandwidth_gbps, size) * BYTES_PER_GIGABIT,
        tuple(
            Relay(each.id, each.up_gbps * BYTES_PER_GIGABIT, each.down_gbps * BYTES_PER_GIGABIT) for each in read.relays
        ),
        None
        if read.via is None
        else _via(read.via, [*(node.id for node in read.nodes), *(each.id for each in read.relays)], size),
    )


def _via(rows: list[list[str | None]], names: Sequence[str], size: int) -> Ints:
    """See Cluster.via. ``names`` are those of the nodes, then of the relays."""
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(names)} | {None: -1}
    for i, row in enumerate(_square("via", rows, size)):
        for j, name in enumerate(row):
            if name not in numbers:
                raise ValueError(f"via[{i}][{j}] is {name!r:.80}; it must be the id of a node or relay, or null")
    via = np.array([[numbers[name] for name in row] for row in rows], dtype=np.int64).reshape(size, size)
    np.fill_diagonal(via, -1)
    return via


def _matrix(key: str, rows: list[list[float]], size: int) -> Floats:
    """The diagonal is ignored."""
    matrix = np.array(_square(key, rows, size), dtype=np.float64).reshape(size, size)
    np.fill_diagonal(matrix, 0.0)
    return matrix


def _square(key: str, rows: list[list[Entry]], size: int) -> list[list[Entry]]:
    """``rows``, which are a row and a column per node, or ValueError."""
    if len(rows) != size:
        raise ValueError(f"{key} has {len(rows)} rows; there are {size} nodes")
    for i, row in enumerate(rows):
        if len(row) != size:
            raise ValueError(f"{key}[{i}] has {len(row)} columns; there are {size} nodes")
    return rows

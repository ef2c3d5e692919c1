"""NETWORK.json: a cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dtfm.scheduler.formats.fields import check_keys, list_of, number_of, read_document, text_of
from dtfm.scheduler.model.cluster import Cluster, Node, Relay
from dtfm.scheduler.model.problem import Floats, Ints

BYTES_PER_GIGABIT = 1e9 / 8
"""Converts Gbit/s to bytes per second."""


def parse_network(text: str) -> Cluster:
    """A cluster from NETWORK.json: ``{"nodes": [{"id", "region", "flops", "memory_bytes"}], "latency_ms", "bandwidth_gbps"}``.

    Matrices are one way: row = source, column = destination. ``region``, ``up_gbps``, ``down_gbps``, ``host_memory_bytes``
    and the matrix ``ratio`` are optional. ``host_memory_bytes`` are the host's, for optimizer state; without it the device
    computes in the host's own memory. ``"proven": false`` marks a node whose work nobody has checked yet (default true):
    where there are others, each stage has one of them. ``ratio`` is the number of encoded bytes per byte of activations and
    gradients on each link (default 1).

    ``"via"``, optional too, has by link the id of the node or relay that passes everything on, or null. ``"relays": [{"id",
    "up_gbps", "down_gbps"}]`` are those that are no nodes.
    """
    document = read_document(text, {"nodes", "latency_ms", "bandwidth_gbps", "ratio", "relays", "via"})
    nodes = []
    for index, entry in enumerate(list_of(document, "nodes", "")):
        path = f"nodes[{index}]"
        keys = {"id", "region", "flops", "memory_bytes", "host_memory_bytes", "up_gbps", "down_gbps", "proven"}
        check_keys(entry, path, keys)
        limits = {
            name: number_of(entry, f"{name}_gbps", path) * BYTES_PER_GIGABIT if f"{name}_gbps" in entry else None
            for name in ("up", "down")
        }
        region = text_of(entry, "region", path) if "region" in entry else ""
        flops, memory = number_of(entry, "flops", path), number_of(entry, "memory_bytes", path)
        host = number_of(entry, "host_memory_bytes", path) if "host_memory_bytes" in entry else None
        proven = entry.get("proven", True)
        if not isinstance(proven, bool):
            raise ValueError(f"{path}.proven is {proven!r:.80}; it must be true or false")
        name = text_of(entry, "id", path)
        nodes.append(Node(name, flops, memory, region, **limits, host_memory_bytes=host, proven=proven))
    latency, bandwidth = (_matrix(document, key, nodes) for key in ("latency_ms", "bandwidth_gbps"))
    ratio = _matrix(document, "ratio", nodes) if "ratio" in document else None
    relays = tuple(
        _relay(entry, f"relays[{i}]") for i, entry in enumerate(list_of({"relays": [], **document}, "relays", ""))
    )
    via = _via(document, nodes, relays) if "via" in document else None
    return Cluster(tuple(nodes), latency / 1e3, bandwidth * BYTES_PER_GIGABIT, ratio, relays=relays, via=via)


def _relay(entry: Any, path: str) -> Relay:
    check_keys(entry, path, {"id", "up_gbps", "down_gbps"})
    up, down = (number_of(entry, key, path) * BYTES_PER_GIGABIT for key in ("up_gbps", "down_gbps"))
    return Relay(text_of(entry, "id", path), up, down)


def _via(document: dict[str, Any], nodes: Sequence[Node], relays: Sequence[Relay]) -> Ints:
    """See Cluster.via."""
    names = [*(node.id for node in nodes), *(relay.id for relay in relays)]
    numbers = {name: number for number, name in enumerate(names)}
    rows = list_of(document, "via", "")
    if len(rows) != len(nodes) or not all(isinstance(row, list) and len(row) == len(nodes) for row in rows):
        raise ValueError(f"via is not a square matrix of {len(nodes)} rows; it needs a row and a column per node")
    via = np.full((len(nodes), len(nodes)), -1)
    for i, row in enumerate(rows):
        for j, name in enumerate(row):
            if name is not None and (not isinstance(name, str) or name not in numbers):
                raise ValueError(f"via[{i}][{j}] is {name!r:.80}; it must be the id of a node or relay, or null")
            via[i, j] = -1 if name is None or i == j else numbers[name]
    return via


def _matrix(document: dict[str, Any], key: str, nodes: Sequence[Node]) -> Floats:
    """A square matrix with a row and a column per node. The diagonal is ignored."""
    size = len(nodes)
    rows = list_of(document, key, "")
    if len(rows) != size:
        raise ValueError(f"{key} has {len(rows)} rows; there are {size} nodes")
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != size:
            shown = f"{len(row)} numbers" if isinstance(row, list) else f"{row!r:.80}"
            raise ValueError(f"{key}[{i}] is {shown}; it must be a list of {size} numbers, as there are nodes")
        for j, value in enumerate(row):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{key}[{i}][{j}] is {value!r:.80}; it must be a number")
            if not (math.isfinite(value) and value >= 0) and i != j:
                raise ValueError(f"{key}[{i}][{j}] is {value}; it must be a finite number, 0 or above")
    matrix = np.array(rows, dtype=np.float64).reshape(size, size)
    np.fill_diagonal(matrix, 0.0)
    return matrix

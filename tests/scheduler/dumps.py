"""Texts of NETWORK.json and WORKLOAD.json, as scheduler/formats reads them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np

from dtfm.scheduler.formats.network import BYTES_PER_GIGABIT
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.workload import Workload


def dump_network(cluster: Cluster) -> str:
    """The text that parse_network reads back."""
    nodes = []
    for node in cluster.nodes:
        entry: dict[str, Any] = {
            "id": node.id,
            "region": node.region,
            "flops": node.flops,
            "memory_bytes": node.memory_bytes,
        }
        entry |= {} if node.host_memory_bytes is None else {"host_memory_bytes": node.host_memory_bytes}
        entry |= {} if node.up is None else {"up_gbps": node.up / BYTES_PER_GIGABIT}
        entry |= {} if node.down is None else {"down_gbps": node.down / BYTES_PER_GIGABIT}
        entry |= {} if node.proven else {"proven": False}
        entry |= {"line": node.line} if node.line else {}
        nodes.append(entry)
    latency, bandwidth = cluster.latency * 1e3, cluster.bandwidth / BYTES_PER_GIGABIT
    matrices = {"latency_ms": latency, "bandwidth_gbps": bandwidth}
    for matrix in matrices.values():
        np.fill_diagonal(matrix, 0.0)
    document: dict[str, Any] = {"nodes": nodes} | {key: matrix.tolist() for key, matrix in matrices.items()}
    document["lines"] = [
        {"id": line.id, "up_gbps": line.up / BYTES_PER_GIGABIT, "down_gbps": line.down / BYTES_PER_GIGABIT}
        for line in cluster.lines
    ]
    return json.dumps(document)


def dump_workload(workload: Workload, tokens: int | None = None) -> str:
    """The text that parse_workload reads back. ``tokens``: of a micro-batch."""
    sizes = ("name", "forward_flops", "parameter_bytes", "activation_bytes")
    document: dict[str, Any] = {
        "layers": [
            {key: getattr(layer, key) for key in sizes}
            | ({} if layer.kept_bytes is None else {"kept_bytes": layer.kept_bytes})
            | ({"working_bytes": layer.working_bytes} if layer.working_bytes else {})
            | ({"frozen_bytes": layer.frozen_bytes} if layer.frozen_bytes else {})
            for layer in workload.layers
        ],
        "micro_batches": workload.micro_batches,
        "backward_per_forward": workload.backward_per_forward,
        "checkpointing": workload.checkpointing or "auto",
        "optimizer_state": workload.optimizer_state or "auto",
    }
    ratios = (f"{part}_bytes_per_parameter_byte" for part in ("optimizer", "copy"))
    document |= {ratio: getattr(workload, ratio) for ratio in ratios}
    if workload.paper is not None:
        document["paper"] = asdict(workload.paper)
    if tokens is not None:
        document["tokens_per_micro_batch"] = tokens
    return json.dumps(document)

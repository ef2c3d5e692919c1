"""Random networks whose nodes have little memory to spare, disturbances of them, and the memory that a change of plan takes
there. Memory is counted layer by layer, without the scheduler's own code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.workload import Layer, Workload


def tight_network(seed: int, *, islands: bool = False) -> tuple[Cluster, Workload]:
    """Nodes that can hold the model between them, and little more. With ``islands``, two or three nodes can hold it, and slow
    lines between two cities make islands worth while."""
    rng = np.random.default_rng(seed)
    count, layers = int(rng.integers(4, 9)), int(rng.integers(6, 13))
    model = tuple(
        Layer(f"l{i}", 10 ** rng.uniform(11, 11.5), 10 ** rng.uniform(7, 7.5), 3e6 if islands else 1e5, 1e6, 1e6)
        for i in range(layers)
    )
    way = rng.choice(np.array([None, *OptimizerState], dtype=object))
    workload = Workload(
        model,
        int(rng.choice([8, 24])),
        copy_bytes_per_parameter_byte=float(rng.choice([0.0, 0.5])),
        sent_per_exchanged_byte=0.05,
        checkpointing=rng.choice(np.array([None, Checkpointing.NONE], dtype=object)),
        optimizer_state=way,
    )
    state = 4.5 * sum(layer.parameter_bytes for layer in model)
    parts = 2 if islands else count
    memory = state / parts * rng.uniform(1.25, 2.0, count)
    host = [None if rng.random() < 0.5 and way is not OptimizerState.HOST else float(2 * each) for each in memory]
    nodes = tuple(
        Node(f"n{i}", 10 ** rng.uniform(12, 12.7), float(memory[i]), host_memory_bytes=host[i]) for i in range(count)
    )
    city = rng.integers(0, 2, count) if islands else np.zeros(count, dtype=np.int64)
    near = 10 ** rng.uniform(8, 9, (count, count))
    bandwidth = np.where(city[:, None] == city, near, near / 300)
    return Cluster(nodes, np.full((count, count), 2e-3), bandwidth), workload


def disturbed(cluster: Cluster, plan: Plan, seed: int) -> Cluster:
    """One node is lost, or speeds drift by up to three times."""
    rng = np.random.default_rng(seed + 1_000_000)
    if rng.random() < 0.5:
        gone = str(rng.choice(plan.nodes))
        return cluster.only([n for n, name in enumerate(cluster.ids) if name != gone])
    nodes = tuple(replace(node, flops=node.flops * 3 ** rng.uniform(-1, 1)) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


def seats(plan: Plan) -> Iterator[tuple[str, tuple[int, int], Keeping]]:
    for stage in plan.stages:
        for place, name in enumerate(stage.replicas):
            yield name, stage.layers, stage.keeping[place] if stage.keeping else Keeping()


def lacking(cluster: Cluster, workload: Workload, before: Plan, after: Plan, first: frozenset[str]) -> dict[str, float]:
    """By node, the bytes that it lacks while ``before`` becomes ``after``. Before they load anything, the nodes in ``first``
    move state that they do not need out of the way: to the host's memory as far as that has room, otherwise to the disk."""
    was = {name: (layers, keeping) for name, layers, keeping in seats(before)}
    found = {}
    for name, layers, keeping in seats(after):
        node = cluster.nodes[cluster.ids.index(name)]
        if name not in was or was[name] == (layers, keeping):
            continue
        device = host = 0.0
        for number, layer in enumerate(workload.layers):
            old = _held(workload, layer, keeping=was[name][1]) if number in range(*was[name][0]) else (0.0, 0.0)
            new = _held(workload, layer, keeping=keeping) if number in range(*layers) else (0.0, 0.0)
            if name in first and new == (0.0, 0.0):
                continue
            device, host = device + max(old[0], new[0]), host + max(old[1], new[1])
        if name in first:  # layers that stay change their place one by one
            parts = [_held(workload, workload.layers[n], keeping=keeping) for n in range(*layers)]
            device, host = (sum(part[at] for part in parts) for at in (0, 1))
        if node.host_memory_bytes is None:
            short = device + host - node.memory_bytes
        else:
            short = max(device - node.memory_bytes, host - node.host_memory_bytes)
        if short >= 1.0:
            found[name] = short
    return found


def _held(workload: Workload, layer: Layer, keeping: Keeping) -> tuple[float, float]:
    """The bytes on the device, and in the host's memory."""
    size, copy = layer.parameter_bytes, workload.copy_bytes_per_parameter_byte
    outer = workload.outer_bytes_per_parameter_byte + workload.momentum_bytes_per_parameter_byte
    if keeping.optimizer_state is OptimizerState.DEVICE:
        return size * (4 + copy), size * outer
    return size * ((copy or 1) + 1), size * (3 + outer)

"""What the exchange of a round takes."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.workload import Workload


def exchange_seconds(cluster: Cluster, workload: Workload, plan: Plan) -> float:
    """Seconds in which all holders of each layer, over all islands, send their changes and get the sums; 0 for one island.

    Each of n holders sends the others their shards of its changes, then all of them the sum of its own: 2 (n - 1) / n of its
    stage's bytes. Under a sparse codec an island's holders divide its changes, and send theirs to all others. What a node sends
    shares its line, as does what it gets; one that is not known is as fast as the fastest of its links. The slowest counts.
    """
    if len(plan.islands) == 1:
        return 0.0
    number = {name: index for index, name in enumerate(cluster.ids)}
    sent = np.zeros(cluster.bandwidth.shape)  # bytes, from one node to another
    for layer, costs in enumerate(workload.layers):
        stages = [stage.replicas for stage in plan.stages if stage.layers[0] <= layer < stage.layers[1]]
        group = [number[node] for replicas in stages for node in replicas]
        size = costs.parameter_bytes * workload.sent_per_exchanged_byte
        for replicas in stages:
            own = [number[node] for node in replicas]
            sent[np.ix_(own, group)] += size * (1 / len(own) if workload.exchanged_with_all else 2 / len(group))
    np.fill_diagonal(sent, 0.0)
    used = sent > 0
    speed = np.where(used, cluster.bandwidth, 0.0)
    ups = np.array([node.up or np.inf for node in cluster.nodes])
    downs = np.array([node.down or np.inf for node in cluster.nodes])
    lines = np.concatenate([np.minimum(speed.max(axis=1), ups), np.minimum(speed.max(axis=0), downs)])
    totals = np.concatenate([sent.sum(axis=1), sent.sum(axis=0)])
    bytes_of, bytes_per_second = np.concatenate([totals, sent[used]]), np.concatenate([lines, speed[used]])
    busy = bytes_of > 0
    if (bytes_per_second[busy] == 0).any():
        return float("inf")
    return float((bytes_of[busy] / bytes_per_second[busy]).max() + 2 * cluster.latency[used].max())

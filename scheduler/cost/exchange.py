"""What rounds cost: the exchange between islands, and the tokens that several islands need more than one."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.workload import Workload

MEASURED_PARAMETERS, TOKENS_PER_ISLAND = 10e6, 0.22
"""The extra tokens that a run needs for the same loss with each island after the first, as a fraction. It holds for a model
with MEASURED_PARAMETERS parameters and an exchange every 30 steps. Measured in 1,200 steps: 0.16 with two islands, 0.25 with
eight; 0.14 and 0.36 with an exchange every 10 and 100 steps (docs/measurements.md)."""

FALL_BY_PARAMETERS, RISE_BY_STEPS = 0.35, 0.4
"""Exponents that scale this fraction by the number of parameters and by the steps between exchanges. The larger the model, the
less islands cost. Losses published for one to eight copies of 35 million to 2.4 billion parameters (arXiv 2503.09799) follow
this rule, with a loss that falls as tokens ** -0.05."""

SPARSELY, RISE_SPARSELY = 1.16, 0.22
"""The factor on the tokens if islands exchange their largest changes alone, every 30 steps. The second number is the exponent
that scales this factor by the steps between exchanges: it is 0.91 with an exchange every 10 (docs/measurements.md)."""


def tokens_needed(islands: int, workload: Workload, length: float) -> float:
    """The tokens for the same loss, as a multiple of the tokens that a run without rounds needs. An estimate. Models smaller
    than the measured ones count as the measured ones. What the run itself has shown is in ``workload.islands_cost``."""
    parameters = sum(layer.parameter_bytes for layer in workload.layers) / 4  # they are trained in float32
    size = max(1.0, parameters / MEASURED_PARAMETERS)
    by_island: float = TOKENS_PER_ISLAND * size**-FALL_BY_PARAMETERS * (length / 30) ** RISE_BY_STEPS
    by_island *= workload.islands_cost
    sparsely = SPARSELY * (length / 30) ** RISE_SPARSELY if workload.exchanged_with_all and islands > 1 else 1.0
    return (1 + by_island * (islands - 1)) * sparsely


def exchange_seconds(cluster: Cluster, workload: Workload, plan: Plan) -> float:
    """Seconds until all holders of each layer, over all islands, have sent their changes and got the sums; 0 for one island.

    Each of n holders sends the others their shards of its changes. Then it sends all of them the sum of its own shard: together
    2 (n - 1) / n of its stage's bytes. Under a sparse codec an island's holders divide its changes and send their parts to all
    other holders. A node's line carries all its traffic. A line of unknown speed is as
    fast as the fastest of its links. The slowest line or link counts.
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
    line, across = cluster.line, cluster.crossing(speed)
    fastest = (np.bincount(line, across.max(axis=axis))[line] for axis in (1, 0))  # of all nodes on the line
    lines = np.concatenate([np.fmin(each, known) for each, known in zip(fastest, cluster.carries, strict=True)])
    totals = np.concatenate(cluster.on_lines(sent))
    bytes_of, bytes_per_second = np.concatenate([totals, sent[used]]), np.concatenate([lines, speed[used]])
    busy = bytes_of > 0
    if (bytes_per_second[busy] == 0).any():
        return float("inf")
    return float((bytes_of[busy] / bytes_per_second[busy]).max() + 2 * cluster.latency[used].max())

"""How many micro-batches a node holds in flight: enough to stay busy for a round trip."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.memory import in_flight
from dtfm.scheduler.model.problem import Draft, Ints, Problem

SLACK = 2.0
"""Factor on the time that a micro-batch spends on links, to allow for queueing and late hosts. On emulated worldwide links
that are about as busy as the devices, it reduced the busiest node's waiting from a quarter of a step to a tenth."""


def depths(problem: Problem, draft: Draft) -> Ints:
    """The largest number of micro-batches in flight on each node of a stage: int64 [stages].

    While a micro-batch travels to the last stage and back (time on links multiplied by SLACK), a node continues with
    as many others as it starts in that time, if it spreads its micro-batches evenly over the busiest device's
    computing time. Each following stage adds one, because devices are not perfectly even. The number is limited by
    memory, but is at least memory.in_flight, for which every valid plan has room.
    """
    stages, (chains, shares) = len(draft.groups), draft.routes
    cuts = np.array(draft.cuts)
    compute = 3 * np.diff(problem.flops_before[cuts]) / problem.flops[chains]
    load = np.bincount(chains.ravel(), np.repeat(shares, stages))[chains]
    onward = np.zeros(chains.shape)
    senders, receivers = chains[:, :-1], chains[:, 1:]
    for a, b in ((senders, receivers), (receivers, senders)):
        onward[:, :-1] += problem.latency[a, b] + problem.activation[cuts[1:-1] - 1] * problem.slowness[a, b]
    round_trip = np.cumsum((compute + SLACK * onward)[:, ::-1], axis=1)[:, ::-1]
    busiest = max(float((compute * load).max()), 1e-12)
    wanted = np.ceil((round_trip * load).max(axis=0) / busiest - 1e-6) + np.arange(stages, 0, -1)
    rooms = np.array([problem.memory[list(group)].min() for group in draft.groups])
    kept = np.maximum(np.diff(problem.kept_before[cuts]), 1.0)
    room = (rooms - problem.state_factor * np.diff(problem.parameters_before[cuts])) // kept
    least = np.array([in_flight(stage, stages) for stage in range(stages)])
    result = np.maximum(least, np.minimum(np.minimum(wanted, room), problem.workload.micro_batches))
    result[-1] = least[-1]  # the last stage turns around at once
    return np.asarray(result, dtype=np.int64)

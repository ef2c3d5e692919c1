"""Where the model is cut into stages, given who holds each."""

from __future__ import annotations

from dtfm.scheduler.memory import in_flight
from dtfm.scheduler.problem import Groups, Problem


def balanced_cuts(problem: Problem, groups: Groups) -> tuple[tuple[int, ...], float]:
    """Cuts that make the slowest stage as fast as possible within every member's memory, and the shortfall in bytes.

    A stage's speed is the sum of its members' (they share the micro-batches); its least memory counts. For a given limit on
    time, taking as many layers as fit from the front on leaves the least for the rest, so a bisection over the limit is
    exact. Shortfall 0 means that everything fits; else it is the least number of bytes by which every device would have to be
    larger, and the cuts are those that would then fit.
    """
    layers = len(problem.workload.layers)
    assert len(groups) <= layers
    speeds = [float(sum(problem.flops[node] for node in group)) for group in groups]
    rooms = [float(min(problem.memory[node] for node in group)) for group in groups]
    work = problem.flops_before.tolist()
    held = [min(in_flight(stage, len(groups)), problem.workload.micro_batches) for stage in range(len(groups))]
    needs = [
        (problem.parameters_before * problem.state_factor + count * problem.kept_before).tolist() for count in held
    ]

    def fill(limit: float, extra: float) -> tuple[int, ...] | None:
        cuts = [0]
        for stage, (speed, room, need) in enumerate(zip(speeds, rooms, needs, strict=True)):
            first = cuts[-1]
            last = layers - (len(groups) - 1 - stage)
            end = first
            flops_limit, bytes_limit = work[first] + limit * speed, need[first] + room + extra
            while end < last and work[end + 1] <= flops_limit and need[end + 1] <= bytes_limit:
                end += 1
            if end == first:
                return None
            cuts.append(end)
        return tuple(cuts) if cuts[-1] == layers else None

    endless = float("inf")
    shortfall = 0.0
    if fill(endless, 0.0) is None:
        low, shortfall = 0.0, max(need[-1] for need in needs)
        while shortfall - low > 1.0 + 1e-6 * low:
            middle = (low + shortfall) / 2
            low, shortfall = (low, middle) if fill(endless, middle) else (middle, shortfall)
    low, high = work[-1] / sum(speeds), work[-1] / min(speeds)
    best = fill(high * (1 + 1e-9), shortfall) or fill(endless, shortfall)
    assert best is not None
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        cuts = fill(middle, shortfall)
        if cuts is None:
            low = middle
        else:
            high, best = middle, cuts
    return best, shortfall

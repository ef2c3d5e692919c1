"""The memory that a change of plan takes: until the new stage is in use, a node holds the old one's state beside it."""

from __future__ import annotations

from dtfm.scheduler.model.keeping import ENOUGH, keepings
from dtfm.scheduler.model.memory import Keeping, OptimizerState
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.problem import Draft, Problem


def short_of_memory(problem: Problem, plan: Plan, draft: Draft) -> tuple[str, float] | None:
    """The node that lacks most to hold its stage of ``plan`` and its new one at the same time, and the bytes; None if all have
    room. Nothing is in flight then. Layers that are in both count once, on the device and in the host's memory, as far as their
    state is there both before and after: what is kept elsewhere from now on is there besides."""
    numbers = {name: number for number, name in enumerate(problem.cluster.ids)}
    old = {
        numbers[name]: (stage.layers, stage.keeping[place] if stage.keeping else Keeping())
        for stage in plan.stages
        for place, name in enumerate(stage.replicas)
        if name in numbers
    }
    lacking = []
    for group, ways, first, past_last in zip(
        draft.groups, keepings(problem, draft), draft.cuts, draft.cuts[1:], strict=False
    ):
        for node, way in zip(group, ways, strict=True):
            if node in old and old[node] != ((first, past_last), way):
                lacking.append((_lacking(problem, node, *old[node], (first, past_last), way), node))
    worst, node = max(lacking, default=(0.0, -1))
    return (problem.cluster.ids[node], worst) if worst >= ENOUGH else None


def _lacking(
    problem: Problem, node: int, old: tuple[int, int], before: Keeping, new: tuple[int, int], after: Keeping
) -> float:
    both = max(0, min(old[1], new[1]) - max(old[0], new[0]))
    shared = (max(old[0], new[0]), max(old[0], new[0]) + both)
    held, added = _state(problem, old, before), _state(problem, new, after)
    known = map(min, _state(problem, shared, before), _state(problem, shared, after))
    device, host = (one + other - same for one, other, same in zip(held, added, known, strict=True))
    own = float(problem.host_memory[node])
    if own == 0.0:
        return float(device + host - problem.memory[node])
    return float(max(device - problem.memory[node], host - own))


def _state(problem: Problem, layers: tuple[int, int], keeping: Keeping) -> tuple[float, float]:
    """The bytes of the layers' state on the device, and in the host's memory."""
    workload = problem.workload
    size = float(problem.parameters_before[layers[1]] - problem.parameters_before[layers[0]])
    if keeping.optimizer_state is OptimizerState.DEVICE:
        return size * workload.bytes_kept_per_parameter_byte, size * workload.for_exchanges_per_parameter_byte
    return size * workload.bytes_beside_host_per_parameter_byte, size * workload.host_bytes_per_parameter_byte

"""Explains why no plan works."""

from __future__ import annotations

import itertools

import numpy as np

from dtfm.scheduler.assemble.evaluate import Candidate
from dtfm.scheduler.model.keeping import Short, shortest
from dtfm.scheduler.model.memory import Checkpointing, OptimizerState, in_flight
from dtfm.scheduler.model.problem import Draft, Problem


def shortfall(problem: Problem, best: Candidate) -> str:
    """A sentence on why ``best``, the least infeasible plan found, is impossible, and what would help."""
    ids, draft = problem.cluster.ids, best.draft
    if best.shortfall_bytes:
        return _too_large(problem) or _short(problem, draft)
    if best.not_proven:
        return "no plan that was found has a proven node in every stage"
    pairs = [(a, b) for group in draft.groups for a in group for b in group]
    pairs += [(a, b) for one, other in itertools.pairwise(draft.groups) for a in one for b in other]
    pairs += [(a, b) for a in draft.groups[0] for b in draft.groups[-1] if problem.workload.tied]
    pairs += [(b, a) for a, b in pairs]
    a, b = next((a, b) for a, b in pairs if np.isinf(problem.slowness[a, b]))
    return (
        f"no plan has all the links it needs: the nearest one found lacks among others "
        f"{ids[a]} -> {ids[b]} (bandwidth 0); make that node reachable or use fewer nodes"
    )


def _too_large(problem: Problem) -> str | None:
    """A sentence on a layer that fits on no node even alone, with a single micro-batch in flight. None if every layer fits."""
    for number, layer in enumerate(problem.workload.layers):
        short = [shortest(problem, (number, number + 1), 1, node) for node in range(len(problem.flops))]
        least = min(short, key=lambda each: each.bytes)
        if least.bytes > 0:
            return (
                f"layer {number} ({layer.name}) is larger than any device: alone, with one micro-batch in flight, it needs "
                f"{size_in_words(least.needed)} of {least.memory}, {size_in_words(least.bytes)} more than "
                f"{problem.cluster.ids[least.node]} has, which lacks the least; {_help(problem, least)}"
            )
    return None


def _short(problem: Problem, draft: Draft) -> str:
    stages, most = len(draft.groups), problem.workload.micro_batches
    worst: Short | None = None
    for stage, group in enumerate(draft.groups):
        held = min(in_flight(stage, stages), most)
        for node in group:
            short = shortest(problem, draft.cuts[stage : stage + 2], held, node)
            if worst is None or short.bytes > worst.bytes:
                worst = short
    assert worst is not None
    first, past_last = worst.layers
    return (
        f"no plan fits the memory: in the nearest one found, {problem.cluster.ids[worst.node]} holds layers [{first}, "
        f"{past_last}), which take {size_in_words(worst.needed)} of {worst.memory} with micro-batches in flight, and lacks "
        f"{size_in_words(worst.bytes)}; {_help(problem, worst)}"
    )


def _help(problem: Problem, short: Short) -> str:
    """What would help, in the order of how little it costs."""
    workload, fixes = problem.workload, []
    if workload.checkpointing is Checkpointing.NONE:
        fixes.append('set activation_checkpointing = "auto"')
    if workload.optimizer_state is OptimizerState.DEVICE and problem.host_memory.any():
        fixes.append('set optimizer_state = "auto"')
    if workload.optimizer_state is OptimizerState.HOST and short.in_host:
        fixes.append('set optimizer_state = "auto"')
    return ", or ".join([*fixes, "add nodes or memory, or shrink the model"])


def size_in_words(number: float) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"

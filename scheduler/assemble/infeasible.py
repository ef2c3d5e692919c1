"""Explains why no plan works."""

from __future__ import annotations

import itertools

import numpy as np

from dtfm.scheduler.assemble.evaluate import Candidate
from dtfm.scheduler.model.problem import Problem


def shortfall(problem: Problem, best: Candidate) -> str:
    """A sentence on what makes ``best``, the least infeasible plan found, impossible."""
    ids, draft = problem.cluster.ids, best.draft
    if best.shortfall_bytes:
        lacking = []
        needs = problem.stage_bytes(draft.cuts).tolist()
        for first, past_last, group, need in zip(draft.cuts, draft.cuts[1:], draft.groups, needs, strict=False):
            lacking += [(need - problem.memory[node], ids[node], first, past_last, need) for node in group]
        lack, node, first, past_last, need = max(lacking)
        return (
            f"no plan fits the memory: in the nearest one found, {node} holds layers [{first}, {past_last}), which take "
            f"{_size(need)} with micro-batches in flight, and lacks {_size(lack)}; add nodes or memory, or shrink the model"
        )
    pairs = [(a, b) for group in draft.groups for a in group for b in group]
    pairs += [(a, b) for one, other in itertools.pairwise(draft.groups) for a in one for b in other]
    pairs += [(b, a) for a, b in pairs]
    a, b = next((a, b) for a, b in pairs if np.isinf(problem.slowness[a, b]))
    return (
        f"no plan has all the links it needs: the nearest one found lacks among others "
        f"{ids[a]} -> {ids[b]} (bandwidth 0); make that node reachable or use fewer nodes"
    )


def _size(number: float) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"

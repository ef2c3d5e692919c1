"""All plans of a small cluster, one by one, to compare bounds and searches with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from dtfm.scheduler.model.problem import Groups, Ints
from dtfm.scheduler.model.request import Shape


def all_groups(count: int, shape: Shape) -> Iterator[Groups]:
    """Every ordered choice of groups among ``count`` nodes within the shape."""

    def place(node: int, groups: list[list[int]]) -> Iterator[Groups]:
        if node == count:
            if groups:
                made = tuple(tuple(group) for group in groups)
                if shape.admits(made):
                    yield made
            return
        yield from place(node + 1, groups)
        for group in groups:
            group.append(node)
            yield from place(node + 1, groups)
            group.pop()
        if len(groups) < shape.most_stages:
            for at in range(len(groups) + 1):
                groups.insert(at, [node])
                yield from place(node + 1, groups)
                groups.pop(at)

    yield from place(0, [])


@lru_cache(maxsize=64)
def all_cuts(layers: int, stages: int) -> Ints:
    """Every way to cut ``layers`` layers into ``stages`` stages: int64 [ways, stages + 1]."""
    inner = itertools.combinations(range(1, layers), stages - 1)
    return np.array([(0, *cuts, layers) for cuts in inner], dtype=np.int64)

"""Random problems with a draft for each, for tests that compare two computations of the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from dtfm.scheduler.model.cluster import Cluster, Line, Node
from dtfm.scheduler.model.problem import Draft, Ints, Problem
from dtfm.scheduler.model.workload import Layer, Workload
from tests.scheduler.clusters import relayed
from tests.scheduler.yardstick_keeping import with_ways


@st.composite
def drafts(draw: st.DrawFn, most_nodes: int = 10, alike: bool | None = None) -> tuple[Problem, Draft]:
    """Any groups, cuts, loads and flows on any cluster: links may be missing, and nodes may have nothing to do.

    ``alike`` clusters have equal nodes, links and layers, with round numbers, so that much happens at the same time.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    nodes, layers = draw(st.integers(1, most_nodes)), draw(st.integers(1, 8))
    alike = draw(st.booleans()) if alike is None else alike
    workload = Workload(tuple(_layer(rng, alike) for _ in range(layers)), draw(st.integers(1, 30)))
    missing = draw(st.sampled_from([0.0, 0.0, 0.02]))
    cluster = _cluster(rng, nodes, alike, missing)
    problem = with_ways(rng, Problem(cluster, workload))
    stages = draw(st.integers(1, min(nodes, layers)))
    return problem, _draft(rng, problem, stages, draw(st.integers(stages, nodes)))


def _layer(rng: np.random.Generator, alike: bool) -> Layer:
    if alike:
        return Layer("", 1e12, 6e6, 4e6)
    nothing = rng.random() < 0.1
    return Layer("", 0.0 if nothing else 10 ** rng.uniform(9, 13), 10 ** rng.uniform(4, 9), 10 ** rng.uniform(3, 8))


def _cluster(rng: np.random.Generator, count: int, alike: bool, missing: float) -> Cluster:
    def limit() -> float | None:
        return None if rng.random() < 0.5 else 8e6 if alike else 10 ** rng.uniform(6, 8)

    nodes = tuple(
        Node(
            f"n{number}",
            1e12 if alike else 10 ** rng.uniform(11, 13),
            10 ** rng.uniform(8, 11),
            up=limit(),
            down=limit(),
        )
        for number in range(count)
    )
    shape = (count, count)
    bandwidth = np.full(shape, 8e6) if alike else 10 ** rng.uniform(5, 9, shape)
    bandwidth[(rng.random(shape) < missing) & ~np.eye(count, dtype=bool)] = 0.0
    latency = np.full(shape, 0.5) if alike else 10 ** rng.uniform(-4, 0.5, shape)
    relays, via = relayed(rng, count) if rng.random() < 0.3 else ((), None)
    machines = tuple(Line(f"m{number}", 10 ** rng.uniform(6, 8), 10 ** rng.uniform(6, 8)) for number in range(2))
    if rng.random() < 0.3:
        nodes = tuple(replace(node, line=str(rng.choice(["", "m0", "m1"]))) for node in nodes)
    return Cluster(nodes, latency, bandwidth, (*relays, *machines), via)


def _draft(rng: np.random.Generator, problem: Problem, stages: int, used: int) -> Draft:
    layers, micro_batches = len(problem.activation), problem.workload.micro_batches
    order = rng.permutation(len(problem.flops))[:used]
    inner = np.sort(rng.permutation(np.arange(1, used))[: stages - 1])
    groups = tuple(tuple(part.tolist()) for part in np.split(order, inner))
    cuts = (0, *np.sort(rng.permutation(np.arange(1, layers))[: stages - 1]).tolist(), layers)
    # Every micro-batch takes any nodes, or each group's first ones only.
    places = [rng.integers(0, rng.integers(1, len(group) + 1), micro_batches) for group in groups]
    return Draft.of(
        groups,
        cuts,
        tuple(np.bincount(place, minlength=len(group)) for place, group in zip(places, groups, strict=True)),
        tuple(
            counted(a, b, (len(before), len(after)))
            for (a, b), (before, after) in zip(pairwise(places), pairwise(groups), strict=True)
        ),
    )


def counted(senders: Ints, receivers: Ints, shape: tuple[int, int]) -> Ints:
    counts = np.zeros(shape, dtype=np.int64)
    np.add.at(counts, (senders, receivers), 1)
    return counts

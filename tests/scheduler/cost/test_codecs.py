"""Sent tensors count by their own codec, in every price and bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dtfm.scheduler.assemble.evaluate import Evaluator
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.workload import Layer, Workload
from tests.scheduler.clusters import random_cluster
from tests.scheduler.plans import iteration_bound, random_draft

PLENTY = 1e18
ACTIVATIONS, REDUCTIONS = 0.5, 0.25
SENT = Workload(
    tuple(Layer(f"{n}", 1e9, 4e6 + n, 2e6 + n, kept_bytes=1.0) for n in range(6)),
    8,
    sent_per_activation_byte=ACTIVATIONS,
    sent_per_reduced_byte=REDUCTIONS,
)
"""A workload with codecs, and a workload that is as small without them. Only memory could tell them apart."""
SMALL = Workload(
    tuple(
        replace(
            layer,
            activation_bytes=layer.activation_bytes * ACTIVATIONS,
            parameter_bytes=layer.parameter_bytes * REDUCTIONS,
        )
        for layer in SENT.layers
    ),
    8,
)


def problems(seed: int) -> tuple[Problem, Problem]:
    cluster = random_cluster(seed, 7)
    cluster = replace(cluster, nodes=tuple(replace(node, memory_bytes=PLENTY) for node in cluster.nodes))
    return Problem(cluster, SENT), Problem(cluster, SMALL)


@pytest.mark.parametrize("seed", range(4))
def test_activations_and_reductions_count_by_their_bytes_on_the_link(seed: int) -> None:
    sent, small = problems(seed)
    rng = np.random.default_rng(seed)
    for draft in (random_draft(rng, sent) for _ in range(5)):
        assert simulate(sent, draft) == pytest.approx(simulate(small, draft), rel=1e-9)
    found = [
        Evaluator(problem, keep_idle_hands=True).estimated(((0, 1, 2), (3, 4), (5, 6)), (0, 2, 4, 6)).seconds
        for problem in (sent, small)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert iteration_bound(sent) == pytest.approx(iteration_bound(small), rel=1e-9)


def test_moved_state_is_not_compressed() -> None:
    sent, small = problems(0)
    assert np.allclose(sent.parameters_before * REDUCTIONS, small.parameters_before)

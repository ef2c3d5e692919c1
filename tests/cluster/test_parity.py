"""Nodes together train exactly what one process would."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, losses_alone, run_file

STEPS = 12


def train(folder: Path, text: str, nodes: int, *, invited: bool = False) -> Cluster:
    with Cluster(folder, text, invited=invited) as cluster:
        for number in range(nodes):
            cluster.add(f"n{number}")
        assert cluster.finish() == 0
    return cluster


def assert_equal_losses(cluster: Cluster, tolerance: float) -> None:
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=tolerance, abs=0)
    # Replicas vote with a digest of their state; the coordinator compares the digests and ends the run when they differ.
    assert not cluster.of("digest_mismatch")
    assert [e["step"] for e in cluster.of("step_committed")] == list(range(1, STEPS + 1))
    assert all(e["samples"] == 20 for e in cluster.of("step_committed"))


SHAPES = {"2x2": [2, 2], "4x1": [1, 1, 1, 1], "1x4": [4], "2+1+1": [2, 1, 1]}
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2}


def cases() -> Iterator[ParameterSet]:
    """fp64, whose tolerance is tight, with unequal stages. The rest is for `make soak`; of bf16 the one process computes the
    losses in fp32."""
    for precision, (name, stages) in itertools.product(TOLERANCES, SHAPES.items()):
        short = (precision, name) == ("fp64", "2+1+1")
        marks = [] if short else [pytest.mark.soak]
        yield pytest.param(stages, precision, id=f"{precision}-{name}", marks=marks)


@pytest.mark.parametrize(("stages", "precision"), list(cases()))
def test_llama(tmp_path: Path, stages: list[int], precision: str) -> None:
    text = run_file(stages=stages, steps=STEPS, precision=precision)
    cluster = train(tmp_path, text, sum(stages))
    assert_equal_losses(cluster, TOLERANCES[precision])
    plan = cluster.of("plan_adopted")[-1]["plan"]
    assert [len(stage["replicas"]) for stage in plan["stages"]] == stages


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_layers_that_are_compiled(tmp_path: Path) -> None:
    text = run_file(stages=[2, 1], steps=STEPS, precision="fp32").replace("[train]\n", "[train]\ncompile = true\n")
    with Cluster(tmp_path, text) as cluster:
        nodes = [cluster.add(f"n{number}") for number in range(3)]
        assert cluster.finish(timeout=500) == 0  # a compiler that runs beside others takes minutes
    assert_equal_losses(cluster, TOLERANCES["fp32"])
    assert not any("train.compile" in node.errors for node in nodes), "this machine has no C++ compiler"


@pytest.mark.soak
def test_gpt2_with_its_tied_embedding_on_different_nodes_that_do_not_trust_each_other(tmp_path: Path) -> None:
    text = run_file(model=GPT2, stages=[2, 1, 1], steps=STEPS) + '[trust]\nmode = "open"\n'
    cluster = train(tmp_path, text, 4, invited=True)
    assert_equal_losses(cluster, 1e-9)
    assert not cluster.of("gradients_clipped")

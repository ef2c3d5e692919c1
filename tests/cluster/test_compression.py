"""Runs under codecs, with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtfm.scheduler.formats.plan import parse_plan
from dtfm.scheduler.model.chains import micro_batches_of
from tests.cluster.launch import Cluster
from tests.cluster.runs import losses_alone, losses_with_largest_gradients, run_file


@pytest.mark.soak
def test_eight_bits_in_both_directions_keep_replicas_equal_and_the_loss_close(tmp_path: Path) -> None:
    text = run_file(stages=[2, 1], steps=20, precision="fp32", compression="i8b256")
    with Cluster(tmp_path, text, nodes="abc") as cluster:
        assert cluster.finish() == 0
    a, b = cluster.of("plan_adopted")[-1]["plan"]["stages"][0]["replicas"]
    (c,) = cluster.of("plan_adopted")[-1]["plan"]["stages"][1]["replicas"]
    eight = "i8b256"
    assert cluster.of("plan_started")[-1]["codecs"] == {
        a: {c: {"activations": eight}, b: {"reduction": eight}},
        b: {c: {"activations": eight}, a: {"reduction": eight}},
        c: {a: {"gradients": eight}, b: {"gradients": eight}},
    }
    assert len(cluster.losses) == 20
    assert cluster.check().findings == ()
    alone = losses_alone(cluster.run_file)
    assert cluster.losses != pytest.approx(alone, rel=1e-6)  # else nothing was compressed
    assert cluster.losses == pytest.approx(alone, rel=0.005)


@pytest.mark.soak
def test_replicas_that_exchange_the_largest_gradients_have_the_losses_of_one_process_that_does(tmp_path: Path) -> None:
    steps = 12
    text = run_file(stages=[2], steps=steps, precision="fp32").replace("[cluster]", 'reduction = "topk"\n[cluster]')
    with Cluster(tmp_path, text, nodes="ab") as cluster:
        assert cluster.finish() == 0
    plan = cluster.of("plan_adopted")[-1]["plan"]
    micro_batches = micro_batches_of(parse_plan(json.dumps(plan)))
    replicas = [micro_batches[node] for node in plan["stages"][0]["replicas"]]
    expected = losses_with_largest_gradients(cluster.run_file, replicas, steps=steps)
    assert cluster.losses == pytest.approx(expected, rel=1e-5)
    assert cluster.check().findings == ()

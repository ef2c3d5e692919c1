"""Runs under codecs, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.launch import Cluster
from tests.cluster.runs import losses_alone, run_file


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

"""A run under a codec, over real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.launch import Cluster
from tests.cluster.runs import losses_alone, run_file


def test_eight_bits_both_ways_keep_replicas_equal_and_the_loss_close(tmp_path: Path) -> None:
    text = run_file(stages=[2, 1], steps=20, precision="fp32", compression="i8b256")
    with Cluster(tmp_path, text) as cluster:
        for name in "abc":
            cluster.add(name)
        assert cluster.finish() == 0
    assert len(cluster.losses) == 20
    alone = losses_alone(cluster.run_file)
    assert cluster.losses != pytest.approx(alone, rel=1e-6)  # it was compressed
    assert cluster.losses == pytest.approx(alone, rel=0.01)


def test_replicas_that_exchange_the_largest_gradients_stay_equal_and_learn(tmp_path: Path) -> None:
    text = run_file(stages=[2], steps=25, precision="fp32").replace("[cluster]", 'reduction = "topk"\n[cluster]')
    with Cluster(tmp_path, text) as cluster:
        for name in "ab":
            cluster.add(name)
        assert cluster.finish() == 0
        assert "reduction to b topk" in cluster.nodes["a"].errors
    assert len(cluster.losses) == 25
    assert not cluster.of("digest_mismatch")
    assert cluster.audit().findings == ()
    alone = losses_alone(cluster.run_file)
    # What is left out comes later, so learning lags; but it is well under way.
    assert sum(cluster.losses[-5:]) / 5 < alone[0] - (alone[0] - sum(alone[-5:]) / 5) / 3

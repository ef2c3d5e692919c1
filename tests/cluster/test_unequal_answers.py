"""Conversations with answers of very different lengths: nodes that hold no more than their stages count each token alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.launch import Cluster
from tests.cluster.runs import held_out_losses_alone, losses_alone
from tests.unequal import unequal_run

STEPS = 6


@pytest.mark.soak
def test_each_learnt_token_counts_alike_on_several_nodes(tmp_path: Path) -> None:
    text = unequal_run(tmp_path, stages=[1, 2], steps=STEPS)
    with Cluster(tmp_path, text) as cluster:
        for name in "abc":
            cluster.add(name)
        assert cluster.finish() == 0
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9, abs=0)
    (evaluated,) = cluster.of("evaluated")
    assert evaluated["loss"] == pytest.approx(held_out_losses_alone(cluster.run_file, STEPS)[-1], rel=1e-9, abs=0)

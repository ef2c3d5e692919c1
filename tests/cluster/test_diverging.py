"""A learning rate that is too high: the run says so, and no node is thrown out for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.launch import Cluster
from tests.cluster.runs import run_file


@pytest.mark.parametrize("stages", [pytest.param([1, 1], marks=pytest.mark.soak), [1, 2]])
def test_a_run_that_diverges_ends_by_the_name_of_its_learning_rate(tmp_path: Path, stages: list[int]) -> None:
    """Of three nodes two can train without the one that says so first, as its device may be at fault. They say it, too, and it is
    forgiven."""
    text = run_file(stages=stages, steps=60, learning_rate=100.0, precision="fp32")
    text = text.replace("warmup_steps = 4", "warmup_steps = 0")
    names = "abc"[: sum(stages)]
    with Cluster(tmp_path, text, coordinator="tests.cluster.alike", nodes=names, invited=True, liars=True) as cluster:
        assert cluster.finish(timeout=300) == 1
        (failed,) = cluster.of("run_failed")
        assert "Lower train.learning_rate, which is 100, " in failed["reason"]
        assert not cluster.of("node_refused")
        thrown_out = [event["node"] for event in cluster.of("node_quarantined")]
        assert len(thrown_out) < sum(stages) - 1
        assert [event["node"] for event in cluster.of("node_forgiven")] == thrown_out

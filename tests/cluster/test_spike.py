"""A learning rate that is far too high: the coordinator says so, and its advice brings the run back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.faults import HOLD, Phase, fail
from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, run_file
from tests.cluster.test_life_cycle import command
from tests.cluster.test_rollback import roll_back


@pytest.mark.soak
def test_a_rate_that_is_far_too_high_is_told_once_and_the_advice_helps(tmp_path: Path) -> None:
    text = run_file(model=GPT2, stages=[1, 1], steps=60, storage="coordinator:", checkpoint_every=10)
    holds = [fail("a").at(step=step, phase=Phase.FORWARD).by(HOLD) for step in (41, 52)]
    with Cluster(tmp_path, text, nodes="ab", faults=holds) as cluster:
        cluster.wait_for("step_committed", where=lambda event: event["step"] == 40)
        command(cluster, "set", "train.learning_rate=20")
        cluster.let_go(holds[0])
        told = cluster.wait_for("loss_spiked")
        assert told["kind"] == "training"
        assert told["since"] > 41 > told["back_to"] > 0
        assert told["loss"] > told["limit"] > 1.05 * told["usual"]
        cluster.wait_for("step_committed", where=lambda event: event["step"] == 51)
        assert len(cluster.of("loss_spiked")) == 1
        roll_back(cluster, told["back_to"])
        command(cluster, "set", "train.learning_rate=0.005")
        cluster.let_go(holds[1])
        assert cluster.finish() == 0
        assert len(cluster.of("loss_spiked")) == 1
        assert cluster.losses[-1] < told["usual"]

"""An operator goes back to an earlier step: each loss equals one process's that does the same."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.cluster.faults import HOLD, Phase, fail
from tests.cluster.launch import Cluster, Process
from tests.cluster.replayed import losses_as_logged
from tests.cluster.runs import GPT2, run_at, run_file
from tests.cluster.test_life_cycle import command

STEPS = 20


def roll_back(cluster: Cluster, step: int) -> str:
    return str(command(cluster, "rollback", str(step), "--yes")["sentence"])


def refused(cluster: Cluster, *words: str) -> str:
    line = [sys.executable, "-m", "dtfm.coordinator.cli", *words, cluster.address]
    process = Process(line, cluster.folder, on_line=lambda _: None)
    assert process.wait(30) == 2
    return process.errors


@pytest.mark.soak
def test_a_run_goes_back_to_a_snapshot_while_it_trains_and_to_weights_while_it_is_paused(tmp_path: Path) -> None:
    """Also over the coordinator's death: a new coordinator has only the log."""
    text = run_file(model=GPT2, stages=[1, 1], steps=STEPS, storage="coordinator:", checkpoint_every=4)
    hold, again = (fail("a").at(step=step, phase=Phase.FORWARD).by(HOLD) for step in (7, 10))
    with Cluster(tmp_path, text, nodes="ab", faults=[hold, again]) as cluster:
        cluster.wait_for("checkpoint_written", where=lambda event: event["step"] == 4)
        cluster.wait_for("step_committed", where=lambda event: event["step"] == 6)
        said = refused(cluster, "rollback", "5", "--yes")
        assert "the state after step 5 is nowhere. There are: 4 (the whole state, on the disks of a, b); 0" in said
        assert "say --yes" in refused(cluster, "rollback", "4"), "nobody can be asked"
        assert "2 steps are trained again from the disks' snapshot of step 4" in roll_back(cluster, 4)
        cluster.let_go(hold)
        cluster.wait_for("checkpoint_written", where=lambda event: event["step"] == 8)
        command(cluster, "pause")
        cluster.let_go(again)
        for kind in ("checkpoint_written", "snapshot_written"):  # then the snapshot of step 8 is on no disk
            cluster.wait_for(kind, where=lambda event: event["step"] == 10)
        assert "from the weights of step 8; AdamW's moments begin at zero" in roll_back(cluster, 8)
        assert sorted(folder.name for folder in (tmp_path / "dtfm-runs/test").glob("step-*")) == [
            "step-00000004",
            "step-00000008",
        ]
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGKILL)
        cluster.coordinator.wait(20)
        cluster.start_coordinator()
        command(cluster, "continue")
        assert cluster.finish() == 0
    log = cluster.log()
    backs = [(event["step"], event["weights"]) for event in log if event["event"] == "rolled_back"]
    assert backs == [(4, False), (8, True)]
    losses = [event["loss"] for event in log if event["event"] == "step_committed"]
    assert losses == pytest.approx([*losses_as_logged(run_at(cluster.run_file), log)], rel=1e-9, abs=0)
    assert cluster.check().findings == ()
    assert json.loads((tmp_path / "dtfm-runs" / "test" / f"step-{STEPS:08d}" / "manifest.json").read_bytes())

"""The coordinator's disk is lost under training, and the run goes on from a backup of its log, which is older than the nodes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.cluster.exact import assert_exact
from tests.cluster.launch import Cluster, Process
from tests.cluster.runs import GPT2, run_file


def command(cluster: Cluster, *line: str) -> None:
    process = Process([sys.executable, "-m", "dtfm.coordinator.cli", *line, "--store", cluster.store], cluster.folder)
    assert process.wait(60) == 0, process.errors


@pytest.mark.soak
def test_a_run_goes_on_from_a_backup_that_its_nodes_are_ahead_of(tmp_path: Path) -> None:
    backup = str(tmp_path / "backup")
    with Cluster(tmp_path, run_file(model=GPT2, stages=[1, 1], steps=5000, checkpoint_every=10), nodes="ab") as cluster:
        kept = cluster.wait_for("checkpoint_written")["step"]
        command(cluster, "backup", backup)
        cluster.wait_for("step_committed", where=lambda e: e["step"] >= kept + 25)
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGKILL)
        cluster.coordinator.wait(10)
        for file in tmp_path.glob("store.*"):
            file.unlink()
        command(cluster, "restore", backup)
        before = len(cluster.events)
        cluster.start_coordinator()
        rolled = cluster.wait_for("rolled_back", after=before)
        assert rolled["step"] >= kept
        cluster.wait_for("step_committed", after=before, where=lambda e: e["step"] > kept + 30)
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish() == 1
    assert_exact(cluster)

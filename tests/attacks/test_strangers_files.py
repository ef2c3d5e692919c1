"""A coordinator that is somebody else's names files of a node's machine: the node takes no part before its operator allows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cluster.launch import ROOT, Cluster
from tests.cluster.runs import run_file


def test_a_run_does_not_read_or_write_files_of_a_stranger(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("A word that nobody else may learn. " * 100)
    checkpoints = tmp_path / "checkpoints"
    run = run_file(stages=[1], steps=1, source=str(secret))
    with Cluster(tmp_path, run, invited=True) as cluster:
        wary = cluster.add("v", environment={"DTFM_ALLOW_DATA": ""})
        assert wary.wait(60) == 2
        assert f"data.source: this node's operator does not let a run use '{secret}' here" in wary.errors
        assert f"start the node with --allow-data '{secret}'" in wary.errors
        left = cluster.wait_for("node_left")
        assert "--allow-data" in left["reason"]
        assert not list(checkpoints.glob("*-v"))
        cluster.add("w", environment={"DTFM_ALLOW_DATA": f"{secret} {checkpoints}"})
        assert cluster.finish() == 0


def test_the_line_to_paste_says_what_the_run_names(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"[data]\nsource = '/data/a b/*.txt'\n[checkpoint]\nuri = '{tmp_path}/shared'\n")
    command = [sys.executable, "-m", "dtfm.coordinator.cli", "serve", "run.toml", "--listen", "127.0.0.1:0"]
    environment = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")}
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "dtfm-node join dtfm1" in line)
        finally:
            process.terminate()
    assert line.rstrip().endswith(f" --allow-data '/data/a b/*.txt' --allow-data {tmp_path}/shared")

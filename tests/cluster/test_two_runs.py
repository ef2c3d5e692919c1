"""Two runs of one user on one machine: a command means the run of the folder it stands in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.launch import ROOT, Process
from tests.cluster.runs import GPT2, run_file, write_corpus


def serve(folder: Path, name: str) -> Process:
    """A coordinator in a folder of its own, as the user starts it there. Returns once it listens."""
    (folder / name).mkdir()
    write_corpus(folder / name)
    (folder / name / "run.toml").write_text(run_file(model=GPT2, stages=[1], steps=5).replace('"test"', f'"{name}"', 1))
    command = [
        sys.executable,
        "-m",
        "dtfm.coordinator.cli",
        "serve",
        "run.toml",
        "--listen",
        "127.0.0.1:0",
        "--verbose",
    ]
    process = Process(command, folder / name, environment=user(folder))
    process.wait_for_error("Started server process")
    return process


def user(folder: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(ROOT)}


def call(folder: Path, where: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dtfm.coordinator.cli", *command],
        cwd=where,
        env={**os.environ, **user(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_command_means_the_run_of_its_folder_and_elsewhere_asks_which(tmp_path: Path) -> None:
    folder, second, first = tmp_path, serve(tmp_path, "two"), serve(tmp_path, "one")
    for name in ("one", "two"):
        said = json.loads(call(folder, folder / name, "pause", "--json").stdout)
        assert (said["run"], said["asked"]) == (name, "pause")
    unclear = call(folder, folder, "stop")
    assert unclear.returncode == 2
    assert unclear.stderr.splitlines()[0] == "dtfm-coordinator: 2 runs are up:"
    assert "run 'one' at 127.0.0.1:" in unclear.stderr
    assert "run 'two' at 127.0.0.1:" in unclear.stderr
    assert call(folder, folder / "two", "stop").stdout.startswith("two: operator-")
    assert second.wait(30) == 0
    assert json.loads(call(folder, folder, "continue", "--json").stdout)["run"] == "one", "the only one that is up"
    first.close()

"""The demo, as a new user runs it."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.cluster.launch import Process
from tests.cluster.leaks import processes_in
from tests.cluster.ports import free_port
from tests.cluster.runs import run_file, write_corpus


@pytest.mark.soak
@pytest.mark.parametrize("own", [False, True])
def test_the_demo_ends_with_what_the_model_learnt_and_commands_that_work(tmp_path: Path, own: bool) -> None:
    """With a run file of its own, or with a smaller one, which has no tokenizer."""
    heard: list[str] = []
    line = [sys.executable, "-m", "dtfm.coordinator.cli", "demo", "--nodes", str(1 + own), "--steps", "3"]
    if not own:
        write_corpus(tmp_path)
        (tmp_path / "run.toml").write_text(run_file(stages=[1], steps=3, precision="fp32"))
        line += ["--run", "run.toml"]
    demo = Process(line, tmp_path, on_line=lambda said: heard.append(said.decode().rstrip()), fresh=True)
    try:
        assert demo.wait(240) == 0, demo.errors
    finally:
        demo.close()
    assert ("about a minute on two free cores" in heard[1]) == own
    said = "\n".join(heard)
    assert re.search(r"Before training +After training", said)
    assert f"waiting: 0 of {1 + own} nodes are ready" in said
    assert "step 1: loss " in said
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "dtfm-demo" / "1" / "model")
    assert (len(tokenizer) == 1024) == own
    commands = [line.strip() for line in heard[heard.index("Try next:") :] if line.startswith("    ")]
    assert len(commands) == 4
    if not own:
        return
    for command in commands[:3]:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
        assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr
    invited = threading.Event()
    last = shlex.split(commands[3].replace("7400", str(free_port())))
    serving = Process(
        last, tmp_path, on_line=lambda line: invited.set() if b"dtfm-node join" in line else None, fresh=True
    )
    try:
        assert invited.wait(60), serving.errors
    finally:
        serving.close()


class Demo:
    def __init__(self, folder: Path, *options: str) -> None:
        self.stepping = threading.Event()
        self.lines: list[dict[str, object]] = []
        (folder / "run.toml").write_text(run_file(stages=[1, 1], steps=400, source="python-stdlib"))
        command = [sys.executable, "-m", "dtfm.coordinator.cli", "demo", "--run", "run.toml", "--nodes", "2", "--json"]
        self.process = Process([*command, *options], folder, on_line=self._heard, fresh=True)

    def _heard(self, line: bytes) -> None:
        self.lines.append(json.loads(line))
        if self.lines[-1]["event"] == "step_committed":
            self.stepping.set()


@pytest.mark.soak
def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    demo = Demo(tmp_path)
    try:
        assert demo.stepping.wait(100), demo.process.errors
        assert len(processes_in(tmp_path)) == 3
        demo.process.send(signal.SIGINT)
        assert demo.process.wait(30) == 1
        assert processes_in(tmp_path) == []
    finally:
        demo.process.close()


@pytest.mark.soak
def test_json_prints_only_events_and_the_demo_exits_with_0(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--steps", "5", "--no-page")
    try:
        assert demo.process.wait(100) == 0, demo.process.errors
    finally:
        demo.process.close()
    committed = [e for e in demo.lines if e["event"] == "step_committed"]
    assert [e["step"] for e in committed] == [1, 2, 3, 4, 5]
    assert {"step", "generation", "loss", "tokens"} <= committed[0].keys()
    adopted = next(e for e in demo.lines if e["event"] == "plan_adopted")
    assert {"generation", "plan", "reason"} <= adopted.keys()
    assert demo.lines[-1]["event"] in ("run_finished", "node_left")

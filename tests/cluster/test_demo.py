"""The demo, as a new user runs it."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path

from tests.cluster.launch import Process
from tests.cluster.leaks import processes_in
from tests.cluster.runs import run_file


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


def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    demo = Demo(tmp_path)
    try:
        assert demo.stepping.wait(60), demo.process.errors
        assert len(processes_in(tmp_path)) == 3
        demo.process.send(signal.SIGINT)
        assert demo.process.wait(30) == 1
        assert processes_in(tmp_path) == []
    finally:
        demo.process.close()


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

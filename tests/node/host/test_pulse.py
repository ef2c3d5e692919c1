"""Signs of life on disk, and `dtfm-node health`, which reads them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dtfm.node.cli import app
from dtfm.node.host import pulse
from dtfm.node.host.pulse import STALE_SECONDS, Pulse, pulse_folder, pulses


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def health(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["health", *arguments])
    return result.exit_code, result.output.strip()


async def test_a_node_says_what_it_does_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "EVERY_SECONDS", 0.0)
    problem, seen = "", asyncio.Event()

    def line() -> str:
        seen.set()
        return "step 3 of 10"

    async with pulse.pulse("attic", lambda: problem, line):
        await asyncio.wait_for(seen.wait(), 10)
        (sign,) = pulses()
        assert (sign.node, sign.pid, sign.said) == ("attic", os.getpid(), "step 3 of 10")
        assert health() == (0, "attic: healthy: step 3 of 10")
        assert health("--id", "cellar") == (1, "cellar: not healthy: no such node of this user runs here")
        problem = "the coordinator does not answer: UNAVAILABLE"
        seen.clear()
        await asyncio.wait_for(seen.wait(), 10)
        assert health() == (1, "attic: not healthy: the coordinator does not answer: UNAVAILABLE")
    assert list(pulses()) == []
    assert health()[0] == 1


def test_a_node_that_is_gone_or_hangs_is_not_healthy_and_all_must_be() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    now = time.time()
    pulse.write(pulse_folder() / "one.json", Pulse("one", os.getppid(), now, "", "step 3"))
    assert health()[0] == 0
    pulse.write(pulse_folder() / "two.json", Pulse("two", ended.pid, now))
    code, said = health()
    assert (code, said.splitlines()[1]) == (1, f"two: not healthy: its process {ended.pid} is gone")
    assert health("--id", "one")[0] == 0
    pulse.write(
        pulse_folder() / "three.json", Pulse("three", os.getpid(), now)
    )  # of an earlier process with this number
    pulse.forget_the_dead()
    assert [each.node for each in pulses()] == ["one"], "a node that starts forgets the dead"
    pulse.write(pulse_folder() / "two.json", Pulse("two", os.getpid(), now - STALE_SECONDS - 30))
    code, said = health("--id", "two", "--json")
    assert (code, json.loads(said)["healthy"]) == (1, False)
    assert "it has said nothing for 9" in json.loads(said)["reason"]


def test_a_file_that_cannot_be_read_is_passed_over() -> None:
    pulse_folder().mkdir(parents=True)
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"node": "c", "more": 1}')):
        (pulse_folder() / f"{name}.json").write_text(text)
    assert list(pulses()) == []


async def test_a_folder_that_cannot_be_written_stops_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    said = asyncio.Event()

    def line() -> str:
        said.set()
        return ""

    async with pulse.pulse("attic", str, line):
        await asyncio.wait_for(said.wait(), 10)

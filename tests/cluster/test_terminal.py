"""A terminal that closes, as when ssh ends, ends programs in order: SIGHUP."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtfm.coordinator.store.store import Store
from tests.cluster.launch import ROOT, Cluster, join_command
from tests.cluster.runs import GPT2, run_file, write_corpus

# Makes its standard input the session's controlling terminal, as a shell's is, and becomes the command.
IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A terminal for one command."""

    def __init__(self, command: list[str], folder: Path, *, piped: bool = False) -> None:
        """``piped``: the output goes elsewhere, and the terminal is its input alone."""
        self._ours, theirs = pty.openpty()
        settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *command],
            cwd=folder,
            stdin=theirs,
            stdout=subprocess.PIPE if piped else theirs,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings, "XDG_STATE_HOME": str(folder / "state")},
            start_new_session=True,
        )
        os.close(theirs)
        self._output = self.process.stdout.fileno() if self.process.stdout is not None else self._ours

    def read_until(self, part: str) -> None:
        """Returns when the command has shown ``part``."""
        shown = b""
        while part.encode() not in shown:
            try:
                shown += os.read(self._output, 4096)
            except OSError:
                raise AssertionError(f"{part!r} did not come:\n{shown.decode()}") from None

    def close(self) -> None:
        """As whoever closes the window, or whose line breaks."""
        os.close(self._ours)


@contextlib.contextmanager
def terminal(command: list[str], folder: Path, *, piped: bool = False) -> Iterator[Terminal]:
    opened = Terminal(command, folder, piped=piped)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait(10)


@pytest.mark.soak
def test_a_node_whose_terminal_closes_hands_its_part_over(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path, run_file(model=GPT2, stages=[1, 1], steps=5000), nodes="a") as cluster,
        terminal(join_command([cluster.address], "b"), tmp_path) as there,
    ):
        cluster.wait_for("step_committed")
        there.close()
        left = cluster.wait_for("node_left")
        assert (left["node"], left["reason"]) == ("b", "in order: SIGHUP")
        assert there.process.wait(30) == 0


def serve(folder: Path) -> list[str]:
    write_corpus(folder)
    (folder / "run.toml").write_text(run_file(stages=[1], steps=5))
    return [
        sys.executable,
        "-m",
        "dtfm.coordinator.cli",
        "serve",
        "run.toml",
        "--listen",
        "127.0.0.1:0",
        "--json",
        "--verbose",
    ]


def test_a_coordinator_whose_terminal_closes_stops_in_order(tmp_path: Path) -> None:
    with terminal(serve(tmp_path), tmp_path) as there:
        there.read_until("run_started")
        there.close()
        there.process.wait(30)
    with Store(f"sqlite:///{tmp_path}/dtfm.db", write=False) as store:
        last = [record.to_json() for record in store.read()][-1]
    assert (last["event"], last["reason"]) == ("coordinator_stopped", "its terminal was closed (SIGHUP)")


@pytest.mark.soak
def test_nohup_keeps_a_coordinator_running(tmp_path: Path) -> None:
    with terminal(["/usr/bin/nohup", *serve(tmp_path)], tmp_path, piped=True) as there:
        there.read_until("run_started")
        there.close()
        there.process.send_signal(signal.SIGTERM)
        there.process.wait(30)
    with Store(f"sqlite:///{tmp_path}/dtfm.db", write=False) as store:
        last = [record.to_json() for record in store.read()][-1]
    assert (last["event"], last["reason"]) == ("coordinator_stopped", "it was terminated (SIGTERM)")

"""Processes that are forked behave like others: exit codes, signals, output; and none is left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.launch import Process

NODE = [sys.executable, "-m", "dtfm.node.cli", "join"]
NOWHERE = "127.0.0.1:9"  # no process listens there


@pytest.mark.parametrize("fresh", [False, True], ids=["forked", "fresh"])
def test_bad_input_exits_with_2_and_says_what_is_wrong(tmp_path: Path, fresh: bool) -> None:
    node = Process([*NODE, "no address"], tmp_path, fresh=fresh)
    assert node.wait(30) == 2
    assert node.errors == (
        "'no address' is not an address: give HOST:PORT, like 192.168.1.20:7400; or an invitation (dtfm1....), or a file with "
        "one\n"
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)])
def test_a_signal_ends_a_forked_node_as_it_would_any_other(tmp_path: Path, number: signal.Signals, code: int) -> None:
    node = Process([*NODE, NOWHERE, "--id", "n", "--give-up-after", "50"], tmp_path)
    node.wait_for_error("does not answer")
    assert node.running.poll() is None
    node.send(number)
    assert node.wait(20) == code
    assert node.running.poll() == code


def test_a_forked_node_has_its_own_folder_and_session(tmp_path: Path) -> None:
    node = Process([*NODE, NOWHERE, "--id", "n"], tmp_path, environment={"WORD": "here"})
    try:
        node.wait_for_error("does not answer")
        process = Path("/proc") / str(node.running.pid)
        assert (process / "cwd").resolve() == tmp_path
        assert os.getsid(node.running.pid) == node.running.pid
    finally:
        node.close()


def test_no_forked_process_outlives_the_one_that_started_the_nursery(tmp_path: Path) -> None:
    module = "dtfm.coordinator.cli"
    script = f"""
import os, signal
from tests.cluster.nursery import Command, Nursery
serve = ("serve", "--listen", "127.0.0.1:0")
child = Nursery(str(os.getpid()), [{module!r}]).fork(Command({module!r}, serve, {str(tmp_path)!r}, dict(os.environ)), 2, 2)
print(child.pid, flush=True)
signal.pause()
"""
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.communicate(timeout=10)
    assert select.select([child], [], [], 20)[0]  # it has ended
    os.close(child)

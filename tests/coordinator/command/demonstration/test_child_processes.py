"""The demo's child processes end with it, and show what went wrong."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from dtfm.coordinator.command.demonstration import child_processes
from dtfm.coordinator.command.demonstration.child_processes import Child, Children


def stand_in(folder: Path, script: str) -> str:
    """An executable that runs the shell script and ignores its arguments."""
    path = folder / "stand-in"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


async def test_a_child_that_ignores_sigterm_ends_with_its_own_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every living process holds the pipe open.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = f"trap '' TERM\nexec 3> {pipe}\nsleep 1000 &\necho started >&3\nwait\nsleep 1000"
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path, script))
    monkeypatch.setattr(child_processes, "TERM_SECONDS", 0.2)
    async with Children("secret", tmp_path, 1, "cpu") as nodes:
        await nodes.start("node-1", lambda child, code: None)
        holders = await asyncio.to_thread(pipe.open)
        assert await asyncio.to_thread(holders.readline) == "started\n"
        child = nodes.running[0]
    assert child.process.returncode is not None
    assert await asyncio.to_thread(holders.read) == ""  # all processes have closed it
    holders.close()


async def test_a_child_that_dies_shows_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "executable", stand_in(tmp_path, "seq 100; echo invitation $DTFM_INVITATION in $*; exit 3")
    )
    gone: asyncio.Queue[tuple[Child, int]] = asyncio.Queue()
    async with Children("secret", tmp_path, 1, "cpu") as nodes:
        await nodes.start("node-1", lambda child, code: gone.put_nowait((child, code)))
        child, code = await asyncio.wait_for(gone.get(), 10)
        assert code == 3
        lines = child.tail().splitlines()
        assert len(lines) == child_processes.TAIL_LINES
        assert lines[-2] == "100"
        assert "invitation secret in" in lines[-1]  # passed in the environment
        assert "secret" not in lines[-1].partition(" in ")[2]  # not in the arguments


async def test_a_childs_files_are_in_the_demos_folder_and_settings_for_the_users_own_nodes_do_not_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path, "echo listen=$DTFM_LISTEN, $*"))
    monkeypatch.setenv("DTFM_LISTEN", "0.0.0.0:7500")
    gone = asyncio.Event()
    async with Children("secret", tmp_path, 1, "cpu") as nodes:
        await nodes.start("node-1", lambda child, code: gone.set())
        await asyncio.wait_for(gone.wait(), 10)
        assert nodes.running[0].tail().startswith("listen=, ")
        assert f"--snapshots {tmp_path / 'snapshots'}" in nodes.running[0].tail()

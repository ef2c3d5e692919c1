"""A process says how it is while its event loop turns; one that hangs, or is gone, is not well."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dtfm.protos.health import VARIABLE, answering, ask

WELL = (True, "step 3")


async def test_who_asks_is_told_what_is_so_now(tmp_path: Path) -> None:
    now = WELL
    async with answering(tmp_path, "a", lambda: now):
        assert await asyncio.to_thread(ask, tmp_path) == (True, ["good a: step 3"])
        now = (False, "without the coordinator")
        assert await asyncio.to_thread(ask, tmp_path) == (False, ["BAD a: without the coordinator"])
    assert ask(tmp_path) == (False, [f"BAD nothing answers in {tmp_path}"])


async def test_all_in_the_folder_must_be_well(tmp_path: Path) -> None:
    async with answering(tmp_path, "a", lambda: WELL), answering(tmp_path, "b", lambda: (False, "alone")):
        assert await asyncio.to_thread(ask, tmp_path) == (False, ["good a: step 3", "BAD b: alone"])


async def test_one_that_hangs_is_not_well(tmp_path: Path) -> None:
    async with answering(tmp_path, "a", lambda: WELL):
        good, told = ask(tmp_path, timeout=0.2)  # on the loop, which cannot answer meanwhile
    assert not good
    assert told == ["BAD a: no answer (timed out)"]


async def test_one_that_was_killed_is_not_well_until_it_is_back(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "a.sock"))
    good, told = await asyncio.to_thread(ask, tmp_path)
    assert not good
    assert told[0].startswith("BAD a: no answer")
    async with answering(tmp_path, "a", lambda: WELL):
        assert await asyncio.to_thread(ask, tmp_path) == (True, ["good a: step 3"])


async def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file.*name another folder with --health"):
        async with answering(tmp_path / "file", "a", lambda: WELL):
            pass


async def test_the_command_exits_with_1_where_nobody_is_well(tmp_path: Path) -> None:
    async with answering(tmp_path, "a", lambda: WELL):
        asked = await asyncio.to_thread(command, tmp_path)
        assert (asked.returncode, asked.stdout) == (0, "good a: step 3\n")
    asked = await asyncio.to_thread(command, tmp_path)
    assert (asked.returncode, asked.stdout) == (1, f"BAD nothing answers in {tmp_path}\n")


def command(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dtfm.protos.health"],
        env={**os.environ, VARIABLE: str(folder)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

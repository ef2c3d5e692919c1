"""Commands where nothing can be kept say so in one line, and which folder to name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.launch import ROOT

COMMANDS = [
    ["dtfm.node.cli", "join", "127.0.0.1:1"],
    ["dtfm.node.cli", "doctor", "--device", "cpu"],
    ["dtfm.coordinator.cli", "serve", "--listen", "127.0.0.1:0"],
    ["dtfm.coordinator.cli", "stop"],
]
ANONYMOUS = ["unshare", "--user", "--map-user=12345"]
"""The user has a number and no name, as in some containers."""


def said(command: list[str], folder: Path, prefix: list[str], **environment: str) -> list[str]:
    """The lines of a command that exits with 1 or 2."""
    others = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_STATE_HOME")}
    done = subprocess.run(
        [*prefix, sys.executable, "-m", *command],
        cwd=folder,
        env={**others, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode in (1, 2), done
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    return [line for line in lines if not line.endswith(" ...")]  # without the lines about long tasks


@pytest.mark.skipif(os.geteuid() != 0, reason="a user without a name needs a namespace")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[1])
def test_a_user_without_a_home_is_told_which_folder_to_name(command: list[str], tmp_path: Path) -> None:
    (line,) = said(command, tmp_path, ANONYMOUS)
    assert "user 12345 has no name and no home folder here; name a folder" in line
    assert line.endswith("XDG_STATE_HOME=DIR, or HOME=DIR")


@pytest.mark.parametrize("command", COMMANDS[:3], ids=lambda command: command[1])
def test_a_home_that_cannot_be_written_is_said_first(command: list[str], tmp_path: Path) -> None:
    """Not even root writes in /proc/sys."""
    lines = said(command, tmp_path, [], HOME="/proc/sys", XDG_CACHE_HOME=str(tmp_path))
    first = lines[lines.index("To fix:") + 1] if command[1] == "doctor" else lines[0]
    assert "/proc/sys/.local" in lines[0]
    assert first.endswith("name a folder that this user may write: XDG_STATE_HOME=DIR, or HOME=DIR")

"""Every node on a machine has a name of its own, the same after a restart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dtfm.node.host.identity import take_name

PROGRAM = """
import sys
from dtfm.node.host.identity import take_name
print(take_name(*sys.argv[1:]), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "dtfm"


@contextmanager
def process(slot: str = "") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """One that has taken a name, and keeps it until it is killed."""
    line = [sys.executable, "-c", PROGRAM, *([slot] if slot else [])]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        yield running.stdout.readline().strip(), running
        running.kill()


def test_each_process_has_its_own_name_and_gets_it_back_when_it_is_started_again() -> None:
    with process() as (first, _), process() as (second, two):
        assert second == f"{first}-2"
        two.kill()
        two.wait(10)
        with process() as (again, _):
            assert again == second
    with process() as (again, _):
        assert again == first


def test_a_devices_slot_is_its_own_whatever_else_runs() -> None:
    with process() as (first, _), process("cuda1") as (device, _):
        assert device == f"{first}-cuda1"
        with pytest.raises(ValueError, match="cuda1 is in use by another dtfm-node"):
            take_name("cuda1")


def test_a_name_that_an_older_version_drew_is_kept(own_state: Path) -> None:
    own_state.mkdir()
    (own_state / "identity").write_text("box-1a2b\n")
    assert take_name() == "box-1a2b"


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out(own_state: Path) -> None:
    own_state.write_text("a file")
    with pytest.raises(ValueError, match=r"nothing can be kept in .*XDG_STATE_HOME=DIR"):
        take_name()

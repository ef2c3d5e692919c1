"""A command loads only the modules that it uses: people wait for it, and the shell waits at each completion."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtfm.coordinator.cli import app
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.store import Store
from dtfm.programs import ended_by_ctrl_c
from dtfm.protos.run_file.run_file import RunFile
from tests.coordinator.stores import store_url

COMMANDS = [
    command.name or command.callback.__name__.replace("_", "-")
    for command in app.registered_commands
    if command.callback
]

LARGE = {"grpc", "cryptography", "numpy", "scipy", "numba", "sqlalchemy", "torch"}

PROGRAM = """
import json, sys
from dtfm.coordinator.cli import main
for line in json.loads(sys.argv[1]):
    sys.argv[1:] = line
    try:
        main()
    except SystemExit:
        print("loaded:", *{name.partition(".")[0] for name in sys.modules}, flush=True)
"""


def loaded(*lines: tuple[str, ...]) -> list[tuple[tuple[str, ...], set[str]]]:
    """The packages that one process has loaded at the end of each of these commands of ``dtfm-coordinator``, one after the
    other."""
    arguments = [sys.executable, "-c", PROGRAM, json.dumps(lines)]
    told = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.splitlines()
    packages = [set(said.split()[1:]) for said in told if said.startswith("loaded:")]
    return list(zip(lines, packages, strict=True))


def test_help_loads_no_large_package() -> None:
    assert "serve" in COMMANDS
    for line, packages in loaded(*((command, "--help") for command in COMMANDS)):
        assert not {*LARGE, "google"} & packages, line


def test_a_question_to_a_coordinator_loads_neither_the_scheduler_nor_a_database() -> None:
    asked = [("members",), ("invite",), ("revoke", "x"), ("expel", "x"), ("forgive", "x"), ("plan-now",), ("stop",)]
    for line, packages in loaded(*((*words, "127.0.0.1:1") for words in asked)):
        assert not {"numpy", "scipy", "numba", "sqlalchemy", "torch"} & packages, line


def test_reading_a_log_loads_neither_the_scheduler_nor_what_a_coordinator_is_called_by(tmp_path: Path) -> None:
    with Store(store_url(tmp_path), write=True) as store:
        store.append([ev.RunStarted("id", RunFile().model_dump(mode="json"))])
    reading = ("members", "events", "watch", "check")
    for line, packages in loaded(*((command, "--store", f"{tmp_path}/dtfm.db") for command in reading)):
        assert not {"cryptography", "numpy", "scipy", "numba", "torch"} & packages, line


@pytest.mark.parametrize("program", ["coordinator", "node"])
def test_ctrl_c_ends_a_program_that_is_loading_without_a_word(program: str) -> None:
    interrupted = (
        "from signal import *; from dtfm import programs; programs.import_module = lambda _: raise_signal(SIGINT)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", f"{interrupted}; programs.{program}()"], capture_output=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")


def test_ctrl_c_is_the_commands_own_matter_once_it_is_loaded() -> None:
    with ended_by_ctrl_c():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

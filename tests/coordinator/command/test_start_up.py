"""A command loads what it uses, and no more: people wait for it, and the shell does at each completion."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dtfm.coordinator.cli import app

COMMANDS = [
    command.name or command.callback.__name__.replace("_", "-")
    for command in app.registered_commands
    if command.callback
]

PROGRAM = """
import sys
from dtfm.coordinator.cli import main
try:
    main()
except SystemExit:
    print("loaded:", *{name.partition(".")[0] for name in sys.modules})
"""


def loaded(*line: str) -> set[str]:
    """The packages that ``dtfm-coordinator`` with these arguments has loaded when it ends."""
    told = subprocess.run([sys.executable, "-c", PROGRAM, *line], capture_output=True, text=True, check=True).stdout
    return set(told.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_loads_no_large_package(command: str) -> None:
    large = {"grpc", "cryptography", "numpy", "scipy", "numba", "sqlalchemy", "torch"}
    assert not large & loaded(command, "--help")


@pytest.mark.parametrize(
    "line", [("members",), ("invite",), ("revoke", "x"), ("expel", "x"), ("forgive", "x"), ("plan-now",)]
)
def test_a_question_to_a_coordinator_loads_neither_the_scheduler_nor_a_database(line: tuple[str, ...]) -> None:
    assert not {"numpy", "scipy", "numba", "sqlalchemy", "torch"} & loaded(*line, "127.0.0.1:1")


@pytest.mark.parametrize("command", ["members", "events", "watch", "check"])
def test_reading_a_log_loads_no_scheduler(command: str) -> None:
    assert not {"scipy", "numba", "torch"} & loaded(command, "--store", "nowhere.db")

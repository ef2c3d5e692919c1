"""`dtfm-node` on a machine that has only the coordinator's packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from dtfm.installed import torch_line

ROOT = Path(__file__).parents[2]


def without(package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``dtfm-node`` where the package is not installed."""
    program = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv = ['dtfm-node', *{arguments!r}]\n"
        f"from dtfm.node.cli import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_missing_extra_is_named_with_the_fix() -> None:
    ended = without("torch", "join")
    assert ended.returncode == 2
    assert "torch is not installed" in ended.stderr
    assert torch_line("node") in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_doctor_works_without_the_extra_and_names_it() -> None:
    ended = without("torch", "doctor")
    assert ended.returncode == 1
    assert "BAD  packages: torch not installed" in ended.stdout
    assert f"1. packages: {torch_line('node')}" in ended.stdout


def test_the_line_that_installs_more_is_all_that_a_pipe_gets() -> None:
    ended = without("torch", "install-line", "--device", "cpu")
    assert (ended.returncode, ended.stdout) == (0, f"{torch_line('node')}\n")
    assert ended.stderr == "# --device cpu\n"
    told = json.loads(without("torch", "install-line", "--device", "cpu", "--json").stdout)
    assert told == {"line": torch_line("node"), "why": "--device cpu"}


def test_what_is_missing_otherwise_is_a_bug_and_not_hidden() -> None:
    assert "Traceback" in without("grpc", "join").stderr


def test_the_coordinator_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None\nimport dtfm.coordinator.cli"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=True)

"""A skip fails in CI, and only there; tests for a GPU may be skipped everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import in_ci

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

def test_skipped():
    pytest.skip("there is no network")

@pytest.mark.gpu
def test_gpu():
    pytest.skip("there is no GPU")

@pytest.mark.xfail
def test_known_to_fail():
    assert False
"""
MODULE = "import pytest\npytest.skip('there is no compiler', allow_module_level=True)\n"


def run(folder: Path, ci: str) -> str:
    """What pytest reports in the end."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    (folder / "test_functions.py").write_text(TESTS)
    (folder / "test_module.py").write_text(MODULE)
    environment = {**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.skips", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout


@pytest.mark.parametrize(("ci", "expected"), [("", False), ("0", False), ("false", False), ("true", True)])
def test_a_variable_says_whether_this_is_ci(ci: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", ci)
    assert in_ci() == expected


def test_outside_ci_a_skip_is_a_skip(tmp_path: Path) -> None:
    assert "3 skipped, 1 xfailed" in run(tmp_path, "false")


def test_in_ci_all_skips_fail_with_their_reasons_except_those_for_want_of_a_gpu(tmp_path: Path) -> None:
    report = run(tmp_path, "true")
    assert "1 failed, 1 skipped, 1 xfailed, 1 error" in report
    for reason in ("there is no network", "there is no compiler"):
        assert f"counts as a failure in CI. Skipped: {reason}" in report

"""In CI a skipped test fails: nobody reads the reasons there, and a test that never runs guards nothing.

CI is where the environment variable CI is set, as .ci/run and the usual services do. Tests that need a GPU (marked ``gpu``) may
be skipped everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    where = report.longrepr
    reason = where[2] if isinstance(where, tuple) else str(where)
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid} was skipped, which counts as a failure in CI. {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    needs_gpu = item.get_closest_marker("gpu") is not None
    if report.skipped and not hasattr(report, "wasxfail") and not needs_gpu and in_ci():
        _refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """For a module that skips itself while it is imported."""
    report = yield
    if report.skipped and in_ci():
        _refuse(report)
    return report

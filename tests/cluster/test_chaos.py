"""Nodes are killed and return for a while: no step is lost, no sample counts twice, nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.chaos import PERIOD, run_chaos

SEED, SECONDS = 1, 600.0


PER_STEP = {"coordinator": 4 * 2**10, "n0": 8 * 2**10}
"""By process, the bytes of memory that it may gain with each step. A node's activations of one step have 160 KiB."""


@pytest.mark.soak
@pytest.mark.timeout(800)
def test_chaos_loses_nothing_and_leaks_nothing(tmp_path: Path) -> None:
    report = run_chaos(tmp_path, SECONDS, SEED, period=PERIOD)
    assert len(report.recovery) == len(report.contribution) == SECONDS // PERIOD
    assert report.findings == ()
    assert report.missing_samples == 0
    assert report.digest_mismatches == 0
    assert report.processes_left == ()
    assert max(report.file_growth.values()) <= 0
    # With six nodes: the coordinator to all, a node to and from five others and to the coordinator.
    assert report.connections["coordinator"] <= 6
    assert report.connections["n0"] <= 2 * 5 + 1
    for name, slope in report.memory_slope.items():
        assert slope * report.steps < PER_STEP[name] * report.steps, (name, slope, report.steps)
    # The usual value is above 0.95, less where others use the machine, too.
    assert report.rate / report.quiet_rate / report.presence > 0.7, report

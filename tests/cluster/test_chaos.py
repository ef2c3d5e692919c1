"""Nodes are killed and return for a while: no step is lost, no sample counts twice, nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.chaos import PERIOD, run_chaos

SEED = 1


@pytest.mark.parametrize(
    ("seconds", "period", "coordinator_kib", "node_kib"),
    [
        pytest.param(20.0, 10.0, 8.0, 100.0, id="short"),
        pytest.param(600.0, PERIOD, 4.0, 8.0, id="long", marks=[pytest.mark.soak, pytest.mark.timeout(800)]),
    ],
)
def test_chaos_loses_nothing_and_leaks_nothing(
    tmp_path: Path, seconds: float, period: float, coordinator_kib: float, node_kib: float
) -> None:
    """``coordinator_kib`` and ``node_kib``: the most growth of memory per step. (A node's activations of one step have 160 KiB.)
    The short run allows more, as memory that is freed and taken again looks like growth within seconds."""
    report = run_chaos(tmp_path, seconds, SEED, period=period)
    assert len(report.recovery) == len(report.contribution) == seconds // period
    assert report.findings == ()
    assert report.missing_samples == 0
    assert report.digest_mismatches == 0
    assert report.processes_left == ()
    assert max(report.file_growth.values()) <= 0
    # With six nodes: the coordinator to all, a node to and from five others and to the coordinator.
    assert report.connections["coordinator"] <= 6
    assert report.connections["n0"] <= 2 * 5 + 1
    grown = {name: slope / 2**10 for name, slope in report.memory_slope.items()}
    assert grown["coordinator"] < coordinator_kib, grown
    assert grown["n0"] < node_kib, grown
    # The usual value is above 0.95. Where others use the machine, too, a short run cannot measure it more closely.
    assert report.rate / report.quiet_rate / report.presence > 0.7, report

"""What must be true of every run, whatever faults there were."""

from __future__ import annotations

import pytest

from tests.cluster.launch import Cluster
from tests.cluster.runs import losses_alone


def assert_exact(cluster: Cluster, tolerance: float = 1e-8) -> None:
    """Steps are consecutive, except after a roll-back, when no node held a stage's state. Each step has the loss that
    one process computes. `check` finds nothing wrong in the log; it would find replicas whose states differed."""
    events = cluster.log()
    alone = losses_alone(cluster.run_file, steps=max(e["step"] for e in events if e["event"] == "step_committed"))
    last = 0
    for event in events:
        if event["event"] == "rolled_back":
            last = event["step"]
        if event["event"] == "step_committed":
            assert event["step"] == last + 1
            assert event["loss"] == pytest.approx(alone[last], rel=tolerance, abs=0)
            last = event["step"]
    assert cluster.check().findings == ()

"""What must hold of a run whatever befell it."""

from __future__ import annotations

import pytest

from tests.cluster.launch import Cluster
from tests.cluster.runs import losses_alone


def assert_exact(cluster: Cluster, tolerance: float = 1e-8) -> None:
    """Steps are consecutive, but for those that went back because no node had a stage's state any more; each has the loss
    that one process has; the log is in order, which includes that replicas held the same bits."""
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
    assert cluster.audit().findings == ()

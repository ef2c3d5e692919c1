"""A line that falls to a small part of its speed within a step: the step goes on under a plan without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dtfm.scheduler.model.cluster import Cluster as Network, Node
from tests.cluster.launch import Event
from tests.cluster.runs import run_file
from tests.wan.cluster import wan_cluster
from tests.wan.test_training import LARGE_ACTIVATIONS
from tests.wan.wan import Wan

NAMES = ("a", "b", "c")
QUICK_GBPS = 1.0
SLOW_GBPS = QUICK_GBPS / 500


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("emulation")
def test_a_line_that_becomes_slow_is_planned_around_before_the_step_is_done(tmp_path: Path) -> None:
    quick = np.full((3, 3), QUICK_GBPS * 1e9 / 8)
    network = Network(tuple(Node(name, 1e9, 1e9) for name in NAMES), np.full((3, 3), 0.001), quick)
    text = run_file(model=LARGE_ACTIVATIONS, stages=[1, 1], steps=5000, precision="fp32", lease=4.0)
    for small, large in (
        ("sequence_length = 32", "sequence_length = 256"),
        ("global_batch = 20", "global_batch = 12"),
        ("micro_batch = 2", "micro_batch = 6"),
        ("evaluation_samples = 8", "evaluation_samples = 6"),
        ("nodes = 2", "nodes = 3"),
    ):
        assert small in text
        text = text.replace(small, large)
    with Wan(network) as wan, wan_cluster(wan, tmp_path, text) as cluster:
        for name in NAMES:
            cluster.add(name)

        def knows_its_speed(committed: Event) -> bool:
            return bool(committed["step"] >= cluster.of("plan_adopted")[-1]["step"] + 8)

        cluster.wait_for("step_committed", where=knows_its_speed, timeout=200)
        plan = cluster.of("plan_adopted")[-1]["plan"]
        first, second = (stage["replicas"][0] for stage in plan["stages"])
        wan.set_link(first, second, gbps=SLOW_GBPS)
        wan.set_link(second, first, gbps=SLOW_GBPS)
        aborted = cluster.wait_for("step_aborted", timeout=120)
        assert aborted["problem"] == "SLOW_LINE"
        after = cluster.events.index(aborted)
        adopted = cluster.wait_for("plan_adopted", after=after)
        assert [stage["replicas"][0] for stage in adopted["plan"]["stages"]] != [first, second]
        cluster.wait_for("step_committed", after=after)
    assert cluster.of("node_left") == cluster.of("suspected") == []

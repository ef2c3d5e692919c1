"""A run across the emulated network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dtfm.scheduler.cluster import Cluster, Node
from tests.cluster.runs import losses_alone, run_file
from tests.wan.cluster import wan_cluster
from tests.wan.wan import Wan

LATENCY, RATE = 0.020, 50e6 / 8


@pytest.mark.usefixtures("emulation")
def test_three_nodes_train_over_slow_links_and_measure_them_as_they_are(tmp_path: Path) -> None:
    nodes = tuple(Node(f"n{number}", 1e9, 1e9) for number in range(3))
    network = Cluster(nodes, np.full((3, 3), LATENCY), np.full((3, 3), RATE))
    text = run_file(stages=[1, 1, 1], steps=5)
    with Wan(network) as wan, wan_cluster(wan, tmp_path, text) as cluster:
        for name in network.ids:
            cluster.add(name)
        assert cluster.finish() == 0
        assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9, abs=0)
        links = {
            (link["source"], link["destination"]): link for e in cluster.of("links_measured") for link in e["links"]
        }
        assert set(links) == {(a, b) for a in network.ids for b in network.ids if a != b}
        for link in links.values():
            assert link["latency_seconds"] == pytest.approx(LATENCY, rel=0.3)
            assert link["bandwidth"] == pytest.approx(RATE, rel=0.3)
        traffic = wan.traffic()
        first, second, third = (s["replicas"][0] for s in cluster.of("plan_adopted")[-1]["plan"]["stages"])
        assert traffic[first, third].bytes < traffic[first, second].bytes  # activations take their route, not another

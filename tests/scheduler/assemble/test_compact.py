"""Networks given per class of nodes: parsed, planned in miniature, and expanded to plans for all nodes."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dtfm.scheduler.assemble.compact import DENSE, CompactCluster
from dtfm.scheduler.cost.reduction import slowest_link
from dtfm.scheduler.formats.network import parse_any_network, parse_network
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.plan import validate
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.tables import tables
from dtfm.scheduler.schedule import schedule
from tests.scheduler.clusters import even_workload, uniform_cluster


def network(count: int, **changes: object) -> dict[str, Any]:
    nodes = [
        {
            "id": f"n{i}",
            "class": "eu" if i % 3 else "us",
            "flops": 1e12 * (1 + i % 5),
            "memory_bytes": 8e9,
            "up_gbps": 0.4,
        }
        for i in range(count)
    ]
    matrices = {"latency_ms": [[1, 40], [50, 2]], "bandwidth_gbps": [[8, 0.2], [0.4, 4]]}
    return {"nodes": nodes, "classes": ["eu", "us"], **matrices, **changes}


def test_a_small_compact_network_equals_its_matrices() -> None:
    cluster = parse_network(json.dumps(network(4)))  # us, eu, eu, us
    assert cluster.latency[0, 1] == 0.050
    assert cluster.bandwidth[1, 2] == 1e9
    assert cluster.bandwidth[1, 0] == 0.2e9 / 8
    assert schedule(cluster, even_workload(), evaluations=50).plan.stages


def test_a_large_network_is_planned_in_miniature_with_a_place_for_every_node() -> None:
    compact = parse_any_network(json.dumps(network(DENSE + 100)))
    assert isinstance(compact, CompactCluster)
    workload = even_workload(12, micro_batches=401)
    decision = schedule(compact, workload, evaluations=2, generation=4)
    ids = {node.id for node in compact.nodes}
    validate(decision.plan, ids, workload)
    assert decision.plan.generation == 4
    assert decision.predicted.iteration_seconds >= decision.lower_bound_seconds > 0
    assert "miniature" in decision.sentence
    assert decision == schedule(compact, workload, evaluations=2, generation=4)


def test_a_miniature_reduces_as_all_the_nodes_it_stands_for_would() -> None:
    whole = replace(uniform_cluster(12), nodes=tuple(Node(f"n{i}", 1e10, 8e9, up=5e7) for i in range(12)))
    small = Cluster(whole.nodes[:3], whole.latency[:3, :3], whole.bandwidth[:3, :3], copies=4)
    of_all, of_few = (tables(Problem(cluster, even_workload())) for cluster in (whole, small))
    assert slowest_link(of_few, np.arange(3))[:2] == pytest.approx(slowest_link(of_all, np.arange(12))[:2])
    assert slowest_link(of_few, np.arange(1))[0] == pytest.approx(slowest_link(of_all, np.arange(4))[0])


def test_options_that_need_matrices_are_refused() -> None:
    compact = parse_any_network(json.dumps(network(DENSE + 1)))
    plan = schedule(uniform_cluster(2), even_workload()).plan
    with pytest.raises(ValueError, match="leave out the incumbent"):
        schedule(compact, even_workload(), plan)
    with pytest.raises(ValueError, match="at most 1024"):
        parse_network(json.dumps(network(DENSE + 1)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": ["eu", "asia"]}, r"nodes\[0\]\.class is 'us'; it must be one of classes: eu, asia"),
        ({"classes": ["eu", "us", "us"]}, r"latency_ms has 2 rows; there are 3 classes"),
        ({"bandwidth_gbps": [[0, 1], [1, 1]]}, r"bandwidth within class 'eu' is 0"),
        ({"latency_ms": [[-1, 1], [1, 1]]}, r"latency_ms\[0\]\[0\] is -1"),
        ({"ratio": [[1, 1], [1, 1]]}, r"ratio is not possible beside classes"),
    ],
)
def test_bad_compact_networks_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_any_network(json.dumps(network(3, **changes)))

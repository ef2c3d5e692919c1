import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dtfm.scheduler.formats.network import parse_network
from dtfm.scheduler.formats.paper import paper_workload
from dtfm.scheduler.formats.plan import decision_document, parse_plan, plan_document
from dtfm.scheduler.formats.workload import parse_workload
from dtfm.scheduler.model.cluster import Line
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState
from dtfm.scheduler.model.plan import Flow, Plan, Stage, Takeover, check
from dtfm.scheduler.schedule import schedule
from tests.scheduler.clusters import even_workload, random_cluster, uniform_cluster
from tests.scheduler.dumps import dump_network, dump_workload

NETWORK: dict[str, Any] = {
    "nodes": [{"id": "a", "flops": 1e12, "memory_bytes": 1e9}, {"id": "b", "flops": 1e12, "memory_bytes": 1e9}],
    "latency_ms": [[0, 10], [20, 0]],
    "bandwidth_gbps": [[0, 8], [0.8, 0]],
}


def test_a_network_is_read_in_seconds_and_bytes_row_to_column() -> None:
    cluster = parse_network(json.dumps(NETWORK))
    assert cluster.ids == ("a", "b")
    assert cluster.latency[0, 1] == 0.010
    assert cluster.bandwidth[1, 0] == 1e8


def test_dumps_parse_back_to_the_same_values() -> None:
    cluster = random_cluster(1, 4)
    hosted_node = replace(cluster.nodes[0], host_memory_bytes=5e9)
    newcomer = replace(cluster.nodes[1], proven=False)
    sharing = [replace(node, line="m") for node in cluster.nodes[2:]]
    cluster = replace(cluster, nodes=(hosted_node, newcomer, *sharing), lines=(Line("m", up=1e8, down=2e8),))
    again = parse_network(dump_network(cluster))
    assert (again.nodes, again.lines) == (cluster.nodes, cluster.lines)
    off_diagonal = ~np.eye(4, dtype=bool)
    np.testing.assert_allclose(again.bandwidth[off_diagonal], cluster.bandwidth[off_diagonal], rtol=1e-12)
    even = even_workload()
    by_layer, hosted = Checkpointing.LAYER, OptimizerState.HOST
    measured = (replace(even.layers[0], kept_bytes=7.0, working_bytes=3.0), *even.layers[1:])
    for workload in (
        paper_workload(),
        even,
        replace(even, copy_bytes_per_parameter_byte=0.5, layers=measured),
        replace(even, checkpointing=by_layer, optimizer_state=hosted),
        replace(even, checkpointing=None, optimizer_state=None),
    ):
        assert parse_workload(dump_workload(workload))[0] == workload
    assert parse_workload(dump_workload(even, tokens=2048)) == (even, 2048, "fp32")
    assert parse_workload(dump_workload(replace(even, copy_bytes_per_parameter_byte=0.5)))[1:] == (None, "bf16")
    plan = schedule(uniform_cluster(4), even_workload(), stages=(2, 1), generation=7).plan
    assert parse_plan(json.dumps(plan_document(plan))) == plan


def test_a_decision_is_plain_json_with_the_documented_keys() -> None:
    document = decision_document(schedule(uniform_cluster(2), even_workload()), elapsed_seconds=0.5)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert set(document["predicted"]) == {"iteration_seconds", "migration_seconds", "exchange_seconds"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": "all"}, r"nodes is 'all'; it must be a valid array"),
        ({"nodes": []}, r"latency_ms has 2 rows; there are 0 nodes"),
        ({"nodes": [{"id": "a", "flops": 0, "memory_bytes": 1}] * 2}, r"'a': flops is 0\.0; .* above 0"),
        ({"nodes": [{"id": "a", "flops": 1, "memory_bytes": 1}] * 2}, r"'a' appears more than once"),
        ({"nodes": [{"id": "a", "flops": 1, "memory_byte": 1}] * 2}, r"nodes\[0\]\.memory_byte is unknown"),
        (
            {"nodes": [{"id": "a", "flops": 1, "memory_bytes": 1, "proven": 1}] * 2},
            r"nodes\[0\]\.proven is 1; it must be a valid boolean",
        ),
        ({"latency_ms": [[0, 1]]}, r"latency_ms has 1 rows; there are 2 nodes"),
        ({"latency_ms": [[0, 1], [1]]}, r"latency_ms\[1\] has 1 columns; there are 2 nodes"),
        (
            {"latency_ms": [[0, -1], [1, 0]]},
            r"latency from 'a' to 'b' is -0\.001; it must be a finite number, 0 or above",
        ),
        ({"bandwidth_gbps": [[0, float("nan")], [1, 0]]}, r"bandwidth from 'a' to 'b' is nan"),
        ({"bandwidth_gbps": [[0, "fast"], [1, 0]]}, r"bandwidth_gbps\[0\]\[1\] is 'fast'; it must be a valid number"),
        ({"links": []}, r"links is unknown"),
        (
            {"nodes": [node | {"line": "m"} for node in NETWORK["nodes"]]},
            r"node 'a': line is 'm'; it must be one of the cluster's lines",
        ),
    ],
)
def test_a_broken_network_is_refused_with_field_and_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_network(json.dumps(NETWORK | change))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"not JSON"),
        ("[]", r"the document is \[\]; it must be an object"),
        ('{"layers": [], "micro_batches": 4}', r"layers is empty"),
        (
            '{"layers": [{"name": "a", "forward_flops": 1, "parameter_bytes": 1}], "micro_batches": 1}',
            r"activation_bytes is miss",
        ),
        ('{"layers": [], "micro_batches": 1.5}', r"micro_batches is 1\.5; it must be a valid integer"),
        (
            '{"layers": [], "micro_batches": 1, "optimizer_state": "hoist"}',
            r"is 'hoist'; it must be 'auto', 'device' or 'host'",
        ),
        ('{"layers": [], "micro_batches": 1, "tokens_per_micro_batch": "2k"}', r"tokens_per_micro_batch is '2k'"),
        (
            '{"layers": [], "micro_batches": 1, "precision": "fp16"}',
            r"precision is 'fp16'; it must be 'fp32', 'bf16' or 'fp64'",
        ),
    ],
)
def test_a_broken_workload_is_refused_with_field_and_value(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_workload(text)


def plan_text(**changes: Any) -> str:
    return json.dumps(plan_document(PLAN) | changes)


PLAN = Plan(
    2,
    (
        Stage((0, 2), ("b",), (8,), (3,)),
        Stage((2, 3), ("c", "d"), (6, 2), keeping=(Keeping(), Keeping(Checkpointing.LAYER, OptimizerState.HOST))),
    ),
    ((Flow("a", "c", 3), Flow("b", "c", 3), Flow("b", "d", 2)),),
    ("e",),
    (Takeover(0, "a", 0, (("b", 3),)),),
)


def test_a_plan_with_takeovers_is_read_back() -> None:
    check(PLAN, 3, 8)
    assert parse_plan(plan_text()) == PLAN
    without = replace(PLAN, takeovers=())
    document = plan_document(without)
    del document["takeovers"]
    assert parse_plan(json.dumps(document)) == without


def test_a_way_to_keep_that_nobody_knows_is_refused() -> None:
    document = plan_document(PLAN)
    document["stages"][1]["keeping"][1]["optimizer_state"] = "auto"
    with pytest.raises(
        ValueError, match=r"stages\[1\]\.keeping\[1\]\.optimizer_state is 'auto'; it must be 'device' or 'host'"
    ):
        parse_plan(json.dumps(document))
    del document["stages"][1]["keeping"][1]
    with pytest.raises(ValueError, match="stage 1 says of 1 replicas how they keep what they need; it has 2"):
        check(parse_plan(json.dumps(document)), 3, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"stages": [{"layers": [0], "replicas": ["a"], "loads": [1]}]},
            r"stages\[0\]\.layers\[1\] is missing",
        ),
        ({"stages": [{"layers": [0, 1], "replicas": ["a"]}]}, r"stages\[0\]\.loads is missing"),
        ({"stages": [{"layers": [0, 1], "replicas": ["a"], "loads": [1.5]}]}, r"stages\[0\]\.loads\[0\] is 1\.5"),
        ({"flows": [3]}, r"flows\[0\] is 3; it must be a valid array"),
        ({"flows": [[{"sender": "a"}]]}, r"flows\[0\]\[0\]\.receiver is missing"),
        (
            {"takeovers": [{"stage": 0, "node": "a", "place": 0, "heirs": [["b"]]}]},
            r"takeovers\[0\]\.heirs\[0\]\[1\] is missing",
        ),
        ({"routes": []}, r"routes is unknown"),
        ({"flows": [[{"sender": "a", "receiver": "c", "load": 3}]]}, r"flows\[0\]\[0\]\.load is unknown"),
    ],
)
def test_a_broken_plan_is_refused_with_field_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_plan(plan_text(**changes))

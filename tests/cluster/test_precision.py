"""A run with an open precision computes in the precision of its first plan's nodes, in whatever order they came."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, losses_alone, run_file


def placed(name: str, command: list[str]) -> list[str]:
    return [word.replace("dtfm.node.cli", "tests.cluster.with_bf16") if name == "gpu" else word for word in command]


@pytest.mark.soak
def test_nodes_prepare_the_run_again_once_the_first_plan_has_decided_in_which_precision(tmp_path: Path) -> None:
    text = run_file(model=GPT2, stages=[1, 1], steps=6, precision="auto")
    with Cluster(tmp_path, text, place=placed) as cluster:
        cluster.add("cpu")
        assert cluster.wait_for("run_changed")["value"] == "fp32"
        cluster.add("gpu")
        assert cluster.finish() == 0
        assert [event["value"] for event in cluster.of("run_changed")] == ["fp32", "bf16"]
        first = cluster.of("plan_adopted")[0]["sequence"]
        assert cluster.of("run_changed")[-1]["sequence"] < first
        assert {event["node"] for event in cluster.of("node_ready") if event["sequence"] < first} == {"cpu", "gpu"}
        assert not any("failed" in node.errors for node in cluster.nodes.values())
    (tmp_path / "alone.toml").write_text(text.replace('"auto"', '"fp32"'))
    alone = losses_alone(tmp_path / "alone.toml")
    assert cluster.losses == pytest.approx(alone, rel=2e-2, abs=0)
    assert cluster.losses != pytest.approx(alone, rel=1e-6, abs=0), "it is bf16"

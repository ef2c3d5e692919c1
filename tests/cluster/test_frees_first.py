"""Nodes that have no memory for their new stage beside the one that they hold: they free first, and nothing is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.launch import Cluster, Process
from tests.cluster.runs import losses_alone, run_file
from tests.wan.given_plan import Given

STEPS = 4
MODEL = """
[model]
family = "llama"
config = { hidden_size = 64, num_hidden_layers = 4, num_attention_heads = 4, intermediate_size = 256 }
"""
#: Each stage has some 5 MiB of state. With micro-batches in flight there is room for one, and never for two.
MEMORY = "8MiB"


@pytest.mark.soak
def test_two_nodes_without_room_for_two_stages_trade_theirs(tmp_path: Path) -> None:
    """Each has what the other needs, and nobody else has it."""
    file = tmp_path / "given-plan"
    before, after = Given((("n0",), ("n1",)), (0, 3, 6)), Given((("n1",), ("n0",)), (0, 3, 6))
    before.write(file)

    def place(name: str, command: list[str]) -> list[str]:
        return [*command[:2], "tests.wan.given_plan", str(file), *command[3:]] if "serve" in command else command

    run = run_file(stages=[1, 1], steps=STEPS, model=MODEL)
    with Cluster(tmp_path, run, place=place) as cluster:
        nodes = [cluster.add(name, "--memory", MEMORY) for name in ("n0", "n1")]
        cluster.wait_for("step_committed", where=lambda event: event["step"] == 1)
        after.write(file)
        assert plan_now(cluster).wait(60) == 0
        assert cluster.finish() == 0
    first, second = cluster.of("plan_adopted")
    assert first["plan"]["frees_first"] == []
    assert second["plan"]["frees_first"] == ["n0", "n1"]
    assert [stage["replicas"] for stage in second["plan"]["stages"]] == [["n1"], ["n0"]]
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9, abs=0)
    for node in nodes:
        assert "made room for the next stage: moved" in node.errors
        assert "MiB to the disk" in node.errors


def plan_now(cluster: Cluster) -> Process:
    return Process([sys.executable, "-m", "dtfm.coordinator.cli", "plan-now", cluster.address], cluster.folder)

"""`plan --objective paper` and `plan --network paper:CASE`, as people and scripts type them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.command.typed import Typed
from tests.scheduler.clusters import even_workload, random_cluster
from tests.scheduler.dumps import dump_network, dump_workload
from tests.scheduler.equal_groups import lumpy_cluster, paper_job

PAPER = "plan", "--objective", "paper", "--deadline", "1"


def complaint(typed: Typed, *arguments: str, code: int = 2) -> str:
    said = typed(*arguments, code=code).strip()
    assert "\n" not in said
    return said


def test_a_case_of_the_paper_is_planned_by_name_alone(typed: Typed) -> None:
    document = json.loads(typed(*PAPER, "--network", "paper:data-center", "--json"))
    assert [len(stage["replicas"]) for stage in document["plan"]["stages"]] == [8] * 8
    seconds = document["predicted"]["paper"]
    assert seconds["total"] == pytest.approx(seconds["data_parallel"] + seconds["pipeline"])
    assert 0 < document["lower_bound_seconds"] <= seconds["total"]
    assert document["gap"] == pytest.approx(seconds["total"] / document["lower_bound_seconds"])


def test_groups_costs_and_the_bound_are_told(tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "n.json").write_text(dump_network(lumpy_cluster(1, 6, 6)))
    (tmp_path / "w.json").write_text(dump_workload(paper_job(3, 2)))
    lines = typed(*PAPER, "--network", str(tmp_path / "n.json"), "--workload", str(tmp_path / "w.json")).splitlines()
    assert [line.split(",")[0] for line in lines[1:4]] == ["Group 1", "Group 2", "Group 3"]
    assert lines[4].startswith("Data-parallel ")
    assert lines[4].endswith(" s a step by the paper's cost model.")
    assert lines[-1].startswith("No plan can take less than ")


def test_a_network_of_the_paper_is_planned_for_steps_too(typed: Typed) -> None:
    document = json.loads(typed("plan", "--network", "paper:universities", "--deadline", "1", "--json"))
    assert "paper" not in document["predicted"]
    assert document["predicted"]["iteration_seconds"] > 0


def test_what_cannot_be_planned_is_told_in_a_line(tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "n.json").write_text(dump_network(random_cluster(5, 6)))
    (tmp_path / "w.json").write_text(dump_workload(even_workload()))
    (tmp_path / "layer.json").write_text(
        json.dumps(json.loads(dump_workload(paper_job(2, 3))) | {"checkpointing": "layer"})
    )
    network, workload = ("--network", str(tmp_path / "n.json")), ("--workload", str(tmp_path / "w.json"))
    cases = "paper:data-center, paper:spot, paper:universities, paper:regional, paper:worldwide"
    assert complaint(typed, *PAPER, "--network", "paper:mars").endswith(
        f"is none of the paper's networks; there are {cases}"
    )
    assert "add them, or say --stages" in complaint(typed, *PAPER, *network, *workload)
    assert "6 nodes make no 4 equal groups" in complaint(typed, *PAPER, *network, *workload, "--stages", "4")
    gpus = "--gpus", "8x RTX 4090", "--links", "500Mbit/s,40ms"
    assert "--gpus has memory limits, which need --objective step" in complaint(typed, *PAPER, *gpus, *workload)
    layer = "--workload", str(tmp_path / "layer.json")
    assert 'has checkpointing "layer"; leave that out' in complaint(typed, *PAPER, *network, *layer)
    (tmp_path / "run.toml").write_text(RUN)
    unequal = *PAPER, *network, *workload, "--run", str(tmp_path / "run.toml")
    assert "stages is (4, 2); the paper's groups are equal, so all must be the same" in complaint(typed, *unequal)


RUN = """
[model]
family = "llama"
config = {hidden_size = 64, num_hidden_layers = 12, num_attention_heads = 4, intermediate_size = 128, vocab_size = 256}
[data]
source = "text.txt"
[train]
steps = 10
global_batch = 8
micro_batch = 1
[cluster]
stages = [4, 2]
"""


@pytest.mark.parametrize("objective", ["step", "paper"])
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("latency_ms", [[0, 1], [1, 0], [1, 1]], "latency_ms has 3 rows; there are 2 nodes"),
        ("bandwidth_gbps", [[0, 1], [1]], "bandwidth_gbps[1] has 1 columns; there are 2 nodes"),
        (
            "bandwidth_gbps",
            [[0, -1], [1, 0]],
            "bandwidth from 'a' to 'b' is -125000000.0; it must be a finite number, 0 or",
        ),
        (
            "latency_ms",
            [[0, float("nan")], [1, 0]],
            "latency from 'a' to 'b' is nan; it must be a finite number, 0 or above",
        ),
        ("nodes", ["a", "a"], "the id 'a' appears more than once; ids must differ"),
    ],
)
def test_a_wrong_network_is_told_in_a_line(
    tmp_path: Path, typed: Typed, objective: str, key: str, value: list[Any], said: str
) -> None:
    document: dict[str, Any] = {"nodes": ["a", "b"], "latency_ms": [[0, 1], [1, 0]], "bandwidth_gbps": [[0, 1], [1, 0]]}
    document |= {key: value}
    document["nodes"] = [{"id": name, "flops": 1e12, "memory_bytes": 1e10} for name in document["nodes"]]
    (tmp_path / "n.json").write_text(json.dumps(document))
    (tmp_path / "w.json").write_text(dump_workload(paper_job(2, 1)))
    network, workload = ("--network", str(tmp_path / "n.json")), ("--workload", str(tmp_path / "w.json"))
    assert said in complaint(typed, "plan", "--objective", objective, *network, *workload)

"""GPUs and links in words: `command/planning/rented.py`, and `plan --gpus`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtfm.coordinator.command.planning.gpus import SUSTAINED
from dtfm.coordinator.command.planning.rented import parse_gpus, parse_links, parse_size, rented_cluster
from tests.coordinator.command.typed import Typed
from tests.scheduler.clusters import even_workload, uniform_cluster
from tests.scheduler.dumps import dump_network, dump_workload
from tests.scheduler.llama import TOKENS, llama


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("RTX 4090", ["RTX 4090"]),
        ("2x RTX 4090, A100 80GB", ["RTX 4090", "RTX 4090", "A100 80GB"]),
        ("1 x geforce rtx4090,1×a100-80gb", ["RTX 4090", "A100 80GB"]),
        ("NVIDIA RTX 6000 Ada,2*L4", ["RTX 6000 Ada", "L4", "L4"]),
        ("4090", ["RTX 4090"]),
    ],
)
def test_gpus_are_read_as_people_write_them(text: str, names: list[str]) -> None:
    assert [gpu.name for machine in parse_gpus(text) for gpu in machine] == names


@pytest.mark.parametrize(
    ("parse", "text", "sentence"),
    [
        (parse_gpus, "8x RTX 4900", "'RTX 4900' is not in the table; did you mean RTX 4090"),
        (parse_gpus, "A100", "did you mean A100 40GB or A100 80GB?"),
        (parse_gpus, "2x abacus", "'abacus' is not in the table; known are RTX 3060,"),
        (parse_gpus, "", "--gpus is '': '' names no GPU; write it like 8x RTX 4090, H200"),
        (parse_gpus, "8x RTX 4090,", "--gpus is '8x RTX 4090,': '' names no GPU"),
        (parse_gpus, "L4, 8x", ": '8x' names no GPU"),
        (parse_gpus, "8x ", ": '8x' names no GPU"),
        (parse_gpus, "0x L4", "--gpus names 0 of 'L4'; it must be 1 to 1000 in all"),
        (parse_gpus, "T4, 00x L4", "--gpus names 0 of 'L4'; it must be 1 to 1000 in all"),
        (parse_gpus, "2x 0x L4", "--gpus names 0 of 'L4'; it must be 1 to 1000 in all"),
        (parse_gpus, "999999x L4", "--gpus names 999999 of 'L4'; it must be 1 to 1000 in all"),
        (parse_links, "500Mbit/s", "it must be a bandwidth and a latency, like 500Mbit/s,40ms"),
        (parse_links, "500Mbps,40ms", "with the unit 'Mbps'; did you mean Mbit/s? Units are bit/s,"),
        (parse_links, "fast,40ms", "the bandwidth is 'fast'; it must be a number and a unit, like 500Mbit/s"),
        (parse_links, "500Mbit/s,40", "the latency is '40', with the unit ''; units are us, ms, s"),
        (parse_links, "0Mbit/s,40ms", "it must be above 0"),
        (parse_links, "500Mbit/s,40000s", "not beyond what exists"),
        (parse_size, "64gib", "with the unit 'gib'; did you mean GiB?"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_could(parse: Any, text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse(text)


def test_units_are_what_they_say() -> None:
    assert parse_links("500Mbit/s,40ms") == (62.5e6, 0.04)
    assert parse_links(" 1.5 GB/s , 0.2 s") == (1.5e9, 0.2)
    assert (parse_size("32GiB"), parse_size("32GB")) == (32 * 2**30, 32e9)


def test_gpus_of_a_machine_share_its_line_and_its_memory() -> None:
    cluster = rented_cluster(parse_gpus("2x L4, 1x 2xT4"), 1e8, 0.01, 1e10, "bf16")
    assert cluster.ids == ("l4-0", "l4-1", "t4-2", "t4-3")
    assert cluster.line.tolist() == [0, 1, 4, 4]
    assert set(cluster.carries.flat) == {1e8}
    assert [node.host_memory_bytes for node in cluster.nodes] == [1e10, 1e10, 5e9, 5e9]
    assert cluster.bandwidth[2].tolist() == [1e8, 1e8, 1e9, 1e9]


def test_a_gpu_is_as_fast_as_the_runs_precision_allows() -> None:
    """TF32 does not count: nodes do not use it. A T4 computes in no bf16. An A100 has tensor cores for fp64."""
    gpus = parse_gpus("RTX 4090, A100 80GB, T4")
    for precision, peaks in (
        ("fp32", [82.6, 19.5, 8.1]),
        ("bf16", [165.2, 312.0, 8.1]),
        ("fp64", [82.6 / 64, 19.5, 8.1 / 32]),
    ):
        cluster = rented_cluster(gpus, 1e8, 0.01, 1e10, precision)
        assert [node.flops for node in cluster.nodes] == pytest.approx([SUSTAINED * peak * 1e12 for peak in peaks])


@pytest.mark.parametrize(
    ("copy", "said", "gpus", "precision", "sentence"),
    [
        (0.0, {}, "3x RTX 4090", "fp32", "speed is for fp32, the precision of this workload"),
        (0.5, {}, "3x RTX 4090", "bf16", "speed is for bf16, the precision of this workload"),
        (0.5, {}, "3x RTX 4090, T4", "bf16", "speed is for bf16; T4 cannot compute in it"),
        (0.0, {"precision": "fp64"}, "3x A100 80GB", "fp64", "speed is for fp64, the precision of this workload"),
    ],
)
def test_plan_says_which_precision_the_speed_is_for(
    copy: float, said: dict[str, str], gpus: str, precision: str, sentence: str, tmp_path: Path, typed: Typed
) -> None:
    workload = dump_workload(replace(even_workload(), copy_bytes_per_parameter_byte=copy))
    (tmp_path / "w.json").write_text(json.dumps(json.loads(workload) | said))
    options = "--links", "500Mbit/s,40ms", "--workload", str(tmp_path / "w.json"), "--deadline", "0.1"
    assert sentence in " ".join(typed("plan", "--gpus", gpus, *options).split())
    document = json.loads(typed("plan", "--gpus", gpus, *options, "--json"))
    assert (document["precision"], document["without_bf16"]) == (precision, ["T4"] if "T4" in gpus else [])


@pytest.mark.parametrize(("gpus", "precision"), [("2x RTX 4090", "bf16"), ("RTX 4090, T4", "fp32")])
def test_a_run_of_any_precision_is_planned_with_what_all_gpus_can(
    gpus: str, precision: str, tmp_path: Path, typed: Typed
) -> None:
    (tmp_path / "run.toml").write_text('name = "any"')
    options = "--links", "500Mbit/s,40ms", "--run", str(tmp_path / "run.toml"), "--deadline", "0.1", "--json"
    assert json.loads(typed("plan", "--gpus", gpus, *options))["precision"] == precision


@pytest.fixture
def gpus(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "w.json").write_text(dump_workload(llama("7B"), TOKENS))
    return (
        *("plan", "--gpus", "6x RTX 4090", "--links", "500Mbit/s,40ms", "--workload", str(tmp_path / "w.json")),
        *("--deadline", "0.2"),
    )


def test_plan_says_what_rented_gpus_would_hold_and_how_fast_they_would_be(gpus: tuple[str, ...], typed: Typed) -> None:
    document = json.loads(typed(*gpus, "--json"))
    seconds = document["predicted"]["iteration_seconds"]
    assert document["tokens_per_second"] == pytest.approx(64 * TOKENS / seconds)
    assert document["limited_by"] in ("device", "link", "reduction", "memory")
    assert max(document["saved_seconds_if_twice_as_good"].values()) < seconds
    assert {node["node"] for node in document["nodes"]} <= {f"rtx-4090-{number}" for number in range(6)}
    for node in document["nodes"]:
        assert 0 < node["memory_bytes"] <= node["memory_available_bytes"] + 1
    printed = typed(*gpus)
    assert "memory planned / available" in printed
    assert " tokens per second. The " in printed


def test_a_network_gets_the_same_table_in_which_nodes_that_hold_the_same_share_a_row_wherever_they_are(
    tmp_path: Path, typed: Typed
) -> None:
    cluster, places = uniform_cluster(3), ("Ohio", "Paris", "Tokyo")
    nodes = tuple(replace(node, region=place) for node, place in zip(cluster.nodes, places, strict=True))
    (tmp_path / "n.json").write_text(dump_network(replace(cluster, nodes=nodes)))
    (tmp_path / "w.json").write_text(dump_workload(even_workload()))
    files = "--network", str(tmp_path / "n.json"), "--workload", str(tmp_path / "w.json")
    printed = typed("plan", *files, "--stages", "1", "--deadline", "0.2")
    assert "memory planned / available" in printed
    assert "tokens per second" not in printed
    rows = [line for line in printed.splitlines() if re.match(r"0 +0-11 ", line)]
    assert len(rows) == 1
    assert all(name in rows[0] for name in cluster.ids)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "give either --network NETWORK.json or --gpus"),
        (("--gpus", "L4"), "--gpus needs --links too"),
        (("--gpus", "L4", "--network", "n.json"), "give either --network NETWORK.json or --gpus"),
        (("--links", "1Gbit/s,1ms", "--network", "n.json"), "--links goes with --gpus"),
    ],
)
def test_a_network_comes_from_a_file_or_from_words(options: tuple[str, ...], sentence: str, typed: Typed) -> None:
    assert sentence in typed("plan", "--workload", "w.json", *options, code=2)

"""Nodes and the coordinator as users see them: a node without a coordinator, one that is refused, signalled or killed."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.cluster.launch import Cluster, Process, join_command
from tests.cluster.ports import free_port
from tests.cluster.runs import GPT2, losses_alone, run_file


def start(folder: Path, *command: str) -> Process:
    return Process(list(command), folder)


def test_a_node_without_a_coordinator_tries_again_with_short_pauses_at_first_and_gives_up_with_1(
    tmp_path: Path,
) -> None:
    node = start(tmp_path, *join_command([f"127.0.0.1:{free_port()}"], "n"), "--give-up-after", "2")
    try:
        assert node.wait(60) == 1
        pauses = [float(p) for p in re.findall(r"trying again in ([\d.]+) s$", node.errors, re.MULTILINE)]
        assert len(pauses) >= 2
        assert max(pauses) <= 0.6
        assert node.errors.count("does not answer") == 1, "it is said once a minute"
        assert "Gave up after 2 s" in node.errors
        assert "Is it running there, and is that port open?" in node.errors
    finally:
        node.close()


def test_a_node_that_starts_before_its_coordinator_joins_when_it_comes(tmp_path: Path) -> None:
    with Cluster(tmp_path, run_file(stages=[1], steps=2), address=f"127.0.0.1:{free_port()}", start=False) as cluster:
        node = cluster.add("early")
        node.wait_for_error("does not answer")
        cluster.start_coordinator()
        assert cluster.finish() == 0
        assert node.wait(20) == 0


def test_a_node_whose_lease_ended_is_told_so_and_comes_back(tmp_path: Path) -> None:
    with Cluster(tmp_path, run_file(stages=[1], steps=5000, model=GPT2, lease=1.0), nodes="a") as cluster:
        cluster.wait_for("step_committed")
        node = cluster.nodes["a"]
        node.send(signal.SIGSTOP)
        left = cluster.wait_for("node_left")
        assert left["reason"] == "no sign of life for 1 seconds"
        node.send(signal.SIGCONT)
        node.wait_for_error(
            "has heard nothing from this node for 1 s, so its lease has ended. It connects again and keeps its state."
        )
        cluster.wait_for("step_committed", after=cluster.events.index(left))
        assert "does not answer" not in node.errors


@pytest.mark.soak
def test_who_lends_a_device_sees_what_it_waits_for_and_then_what_it_does(tmp_path: Path) -> None:
    with Cluster(tmp_path, run_file(stages=[1, 1], steps=5000, model=GPT2)) as cluster:
        lender = cluster.add("lender", "--json")
        lender.wait_for_error("waiting: 1 of 2 nodes are ready")
        cluster.add("other")
        lender.wait_for_error("tokens/s")
        lender.send(signal.SIGTERM)
        assert lender.wait(60) == 0
        worked = sum("lender" in event["compute_seconds"] for event in cluster.of("step_committed"))
    parts = (
        r"step [\d,]+ of 5,000, loss \d\.\d{4}, [\d,]+ tokens/s, [\d:]+ left",
        r"this node: 10 of 10 micro-batches, layers \d-\d of \d; [\d,]+ steps done \([\d,]+ micro-batches since it started\)",
    )
    logged = [json.loads(line) for line in lender.errors.splitlines()]
    [first, *_] = [each for each in logged if re.fullmatch(" \\| ".join(parts), each["message"])]
    assert (first["run"], first["node"], first["generation"], first["level"]) == ("test", "lender", 1, "info")
    assert first["message"].startswith(f"step {first['step']:,} of 5,000, ")
    last = logged[-1]["message"]
    assert last.startswith(f"This node took part: {worked:,} steps done ({10 * worked:,} micro-batches")


def test_a_second_node_with_the_same_identity_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with Cluster(tmp_path, run_file(stages=[1, 1], steps=3)) as cluster:
        cluster.add("twin")
        cluster.wait_for("node_joined")
        again = start(tmp_path, *join_command([cluster.address], "twin"))
        try:
            assert again.wait(60) == 2
            assert "IDENTITY_IN_USE" in again.errors
            assert "--id" in again.errors
        finally:
            again.close()
        cluster.add("other")
        assert cluster.finish() == 0


def test_code_that_the_operator_did_not_allow_is_not_run(tmp_path: Path) -> None:
    model = '[model]\nfamily = "module"\nmodule = "tests.convnet:convnet"\n'
    text = run_file(model=model, source="module:tests.convnet:images", stages=[1], steps=2)
    with Cluster(tmp_path, text) as cluster:
        node = cluster.add("n")
        assert node.wait(60) == 2
        assert "--allow-module tests.convnet" in node.errors


@pytest.mark.soak
def test_a_loss_that_is_not_a_number_ends_the_run_after_three_attempts_and_says_why(tmp_path: Path) -> None:
    model = '[model]\nfamily = "module"\nmodule = "tests.convnet:convnet"\n'
    text = run_file(model=model, source="module:tests.convnet:images_one_of_them_broken", stages=[1, 1], steps=20)
    with Cluster(tmp_path, text) as cluster:
        nodes = [cluster.add(name, "--allow-module", "tests.convnet") for name in ("a", "b")]
        assert cluster.finish() == 1
        aborted = cluster.of("step_aborted")
        assert len(aborted) == 3
        assert {(e["step"], e["problem"]) for e in aborted} == {(aborted[0]["step"], "NON_FINITE")}
        assert "train.learning_rate" in cluster.of("run_failed")[0]["reason"]
        assert [node.wait(20) for node in nodes] == [1, 1]


@pytest.mark.parametrize("fresh", [[], pytest.param(["leaves"], marks=pytest.mark.soak)])
def test_sigterm_hands_over_and_costs_the_others_no_step(tmp_path: Path, fresh: list[str]) -> None:
    """A fresh interpreter hashes strings unlike the others."""
    text = run_file(model=GPT2, stages=[2], steps=20)
    with Cluster(tmp_path, text, fresh=fresh) as cluster:
        cluster.add("stays")
        leaves = cluster.add("leaves")
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 5)
        leaves.send(signal.SIGTERM)
        assert leaves.wait(60) == 0
        left = cluster.wait_for("node_left")
        assert (left["node"], left["reason"]) == ("leaves", "in order: SIGTERM")
        assert cluster.finish() == 0
        assert cluster.of("step_aborted") == []
        assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9, abs=0)


@pytest.mark.soak
def test_the_only_node_leaves_a_checkpoint_from_which_the_next_one_goes_on(tmp_path: Path) -> None:
    with Cluster(tmp_path, run_file(model=GPT2, stages=[1], steps=40)) as cluster:
        first = cluster.add("first")
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 5)
        first.send(signal.SIGTERM)
        assert first.wait(60) == 0
        cluster.add("second")
        assert cluster.finish() == 0
    steps = [e["step"] for e in cluster.of("step_committed")]
    assert steps == list(range(1, 41))
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9, abs=0)


def test_a_second_signal_ends_a_node_at_once(tmp_path: Path) -> None:
    with Cluster(tmp_path, run_file(stages=[1, 1], steps=10)) as cluster:
        node = cluster.add("alone")
        cluster.wait_for("node_ready")
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGSTOP)  # it will not answer, so the node cannot leave in order
        node.send(signal.SIGTERM)
        node.wait_for_error("exits at once")
        assert node.running.poll() is None
        node.send(signal.SIGINT)
        assert node.wait(5) == 130

"""Muon as real processes: the losses of torch's Muon and AdamW in one process, through deaths, copies and state from disks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cluster import test_islands
from tests.cluster.exact import assert_exact
from tests.cluster.faults import SIGKILL, Phase, fail
from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, losses_alone, run_file
from tests.cluster.test_disk_snapshot import bring_back, kill, slow_links


def with_muon(text: str) -> str:
    return text.replace("[train]\n", '[train]\noptimizer = "muon"\n')


def text(stages: list[int], lease: float = 5.0) -> str:
    return with_muon(run_file(model=GPT2, stages=stages, steps=5000, learning_rate=1e-3, lease=lease))


def test_a_replica_dies_and_a_newcomer_takes_over_its_momentum(tmp_path: Path) -> None:
    with Cluster(tmp_path, text([2])) as cluster:
        for name in ("stays", "dies"):
            cluster.add(name)
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 5)
        cluster.nodes["dies"].send(signal.SIGKILL)
        cluster.add("newcomer")
        cluster.wait_for("plan_started", where=lambda e: e["generation"] == 3)
        cluster.wait_for("step_committed", after=len(cluster.events))
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish() == 1
    first = cluster.losses[:12]
    assert first == pytest.approx(losses_alone(cluster.run_file, steps=len(first)), rel=1e-9, abs=0)
    assert_exact(cluster)
    assert not cluster.of("rolled_back")


@pytest.mark.soak
@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.REDUCE, Phase.VOTE])
def test_a_node_of_two_stages_dies_within_a_step_and_another_replaces_it(tmp_path: Path, phase: Phase) -> None:
    fault = fail("b").at(step=6, phase=phase).by(SIGKILL)
    with Cluster(tmp_path, text([2, 2], lease=10.0), nodes="abcd", faults=[fault]) as cluster:
        cluster.wait_for("node_left")
        cluster.add("e")
        cluster.wait_for("plan_started", where=lambda _: "e" in str(cluster.of("plan_adopted")[-1]["plan"]["stages"]))
        cluster.wait_for("step_committed", after=len(cluster.events))
    assert_exact(cluster)


@pytest.mark.soak
def test_the_state_of_a_stage_comes_back_from_a_disk(tmp_path: Path) -> None:
    with slow_links("a", "b") as links, Cluster(tmp_path, text([1, 1], lease=1.0)) as cluster:
        for name in "ab":
            cluster.add(name, *links[name])
        stages = cluster.wait_for("plan_adopted")["plan"]["stages"]
        victim: str = stages[0]["replicas"][0]
        kept = cluster.wait_for("snapshot_written")
        cluster.wait_for("step_committed", where=lambda e: e["step"] >= kept["step"] + 3)
        kill(cluster, victim)
        bring_back(cluster, victim, *links[victim])
    assert_exact(cluster)


@pytest.mark.soak
def test_islands_train_with_muon_and_exchange_as_ever_through_a_death(tmp_path: Path) -> None:
    nodes, fault = ("a1", "br1", "br2"), fail("br1").at(step=6, phase=Phase.BACKWARD).by(SIGKILL)
    run = with_muon(test_islands.text(12, nodes=nodes))
    with Cluster(tmp_path, run, coordinator="tests.cluster.drawn", nodes=nodes, faults=[fault]) as cluster:
        assert cluster.finish() == 0
        test_islands.assert_exact_islands(cluster)

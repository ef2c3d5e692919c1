"""A node's computation hangs while its heartbeats go on. The others go on without it, and it comes back once it works again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.exact import assert_exact
from tests.cluster.faults import HOLD, OF_A_STEP, Phase, announcement, fail
from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, run_file

NODES = ("a", "b", "c", "d")
LEASE = 1.5
MOST_LEASES = 4
"""From the hang to the next commit: two leases and three steps, on a machine that others use."""

HANGS = [phase for phase in OF_A_STEP if phase is not Phase.COMMIT]
"""In COMMIT it would be the thread that beats."""


@pytest.mark.parametrize(
    "phase",
    [pytest.param(each, marks=() if each is Phase.FORWARD else pytest.mark.soak) for each in HANGS],
    ids=lambda phase: phase.value,
)
def test_the_others_go_on_without_a_node_that_hangs_and_it_comes_back(tmp_path: Path, phase: Phase) -> None:
    text = run_file(model=GPT2, stages=[2, 2], steps=5000, learning_rate=1e-3, lease=LEASE)
    with Cluster(tmp_path, text, nodes=NODES, faults=[]) as cluster:
        cluster.wait_for("step_committed", where=lambda e: e["step"] >= 3)
        hold = fail("b").at(step=cluster.of("step_committed")[-1]["step"] + 2, phase=phase).by(HOLD)
        cluster.inject(hold)
        cluster.nodes["b"].wait_for_error(announcement(hold))
        began, last = time.monotonic(), cluster.of("step_committed")[-1]["step"]
        out = cluster.wait_for("node_out_of_use")
        cluster.wait_for("step_committed", where=lambda e: e["step"] > last, after=cluster.events.index(out))
        seconds = time.monotonic() - began
        print(f"{phase.value}: {seconds:.1f} s from the hang to the next commit, {seconds / LEASE:.1f} leases")
        assert out["node"] == "b"
        cluster.let_go(hold)
        tested = cluster.wait_for("node_tested")
        cluster.wait_for(
            "step_committed", where=lambda e: "b" in e["compute_seconds"], after=cluster.events.index(tested)
        )
        assert [name for name, process in cluster.nodes.items() if process.running.poll() is not None] == []
    for kind in ("node_left", "node_quarantined", "run_failed", "rolled_back"):
        assert cluster.of(kind) == [], kind
    assert seconds < MOST_LEASES * LEASE
    assert_exact(cluster, 1e-9)


@pytest.mark.soak
def test_so_they_do_if_it_hangs_as_it_takes_its_place_in_a_plan(tmp_path: Path) -> None:
    text = run_file(model=GPT2, stages=[2, 2], steps=5000, learning_rate=1e-3, lease=LEASE)
    hold = fail("b").at(step=0, phase=Phase.ADOPT).by(HOLD)
    with Cluster(tmp_path, text, nodes=NODES, faults=[hold]) as cluster:
        cluster.nodes["b"].wait_for_error(announcement(hold))
        cluster.wait_for("node_out_of_use")
        cluster.wait_for("step_committed")
        cluster.let_go(hold)
        tested = cluster.wait_for("node_tested")
        cluster.wait_for(
            "step_committed", where=lambda e: "b" in e["compute_seconds"], after=cluster.events.index(tested)
        )
    assert cluster.of("node_left") == []
    assert_exact(cluster, 1e-9)

"""The coordinator may die at any moment: committed steps stay committed, and the nodes go on with the state that they hold."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from dtfm.protos.identity.invitation import read_invitation
from tests.cluster.exact import assert_exact
from tests.cluster.faults import COORDINATOR, SIGKILL, Phase, announcement, fail
from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, losses_alone, run_file

STEPS = 60
DEATHS = [
    fail(COORDINATOR).at(step=0, phase=Phase.JOIN).by(SIGKILL),
    fail(COORDINATOR).at(step=0, phase=Phase.ADOPT).by(SIGKILL),
    fail(COORDINATOR).at(step=5, phase=Phase.VOTE).by(SIGKILL),
    fail(COORDINATOR).at(step=20, phase=Phase.COMMIT).by(SIGKILL),
]


@pytest.mark.soak
def test_killed_and_restarted_several_times_it_loses_no_step(tmp_path: Path) -> None:
    text = run_file(model=GPT2, stages=[2, 1], steps=STEPS)
    with Cluster(tmp_path, text, faults=DEATHS, nodes="abc") as cluster:
        for death in DEATHS:
            assert cluster.coordinator is not None
            cluster.coordinator.wait_for_error(announcement(death))
            cluster.coordinator.wait(10)
            cluster.start_coordinator()
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 40)
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGKILL)  # at no particular moment
        cluster.coordinator.wait(10)
        cluster.start_coordinator()
        assert cluster.finish() == 0
        assert not cluster.of("rolled_back")
    # Read from the log, as the kill may have come after a commit was written and before it was printed.
    committed = [e for e in cluster.log() if e["event"] == "step_committed"]
    assert [e["step"] for e in committed] == list(range(1, STEPS + 1))
    assert [e["loss"] for e in committed] == pytest.approx(losses_alone(cluster.run_file), rel=1e-9, abs=0)


def test_nodes_that_reconnect_one_by_one_lose_nothing_when_the_run_file_names_no_number_of_nodes(
    tmp_path: Path,
) -> None:
    text = run_file(model=GPT2, stages=[1, 1], steps=5000)
    with Cluster(tmp_path, text, nodes="ab") as cluster:
        assert cluster.coordinator is not None
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 8)
        cluster.nodes["b"].send(signal.SIGSTOP)
        cluster.coordinator.send(signal.SIGKILL)
        cluster.coordinator.wait(10)
        cluster.run_file.write_text(re.sub(r"nodes = .*\nstages = .*\n", 'stages = "auto"\n', text))
        before = len(cluster.events)
        cluster.start_coordinator()
        cluster.wait_for("waiting", after=before, where=lambda e: "for b to return" in e["reason"])
        cluster.nodes["b"].send(signal.SIGCONT)
        started = cluster.wait_for("plan_started", after=before)
        cluster.wait_for("step_committed", after=before)
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish() == 1
    assert not cluster.of("rolled_back")
    assert started["step"] > 8
    assert_exact(cluster)


@pytest.mark.soak
def test_a_restart_that_names_no_address_listens_where_the_nodes_look_for_it(tmp_path: Path) -> None:
    with Cluster(tmp_path, run_file(model=GPT2, stages=[1, 1], steps=5000), start=False) as cluster:
        cluster.start_coordinator("--listen", "127.0.0.1:0", "--advertise", "run.example.org:7400")
        first = read_invitation(cluster.invitation)
        cluster.add("a")
        cluster.add("b")
        cluster.wait_for("step_committed")
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGKILL)
        cluster.coordinator.wait(10)
        before, at = len(cluster.events), cluster.address
        cluster.address = ""
        cluster.start_coordinator()
        assert cluster.address == at
        cluster.wait_for("step_committed", after=before)
        assert not [e for e in cluster.events[before:] if e["event"] == "listens"], "nothing has changed"
    assert first.addresses == ("run.example.org:7400",)
    assert cluster.of("listens")[0]["advertised"] == ["run.example.org:7400"]

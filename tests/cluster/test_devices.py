"""Several devices of one machine under one supervisor; processors stand in for GPUs."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.cluster.launch import Cluster, Process
from tests.cluster.leaks import children_of
from tests.cluster.ports import free_port
from tests.cluster.runs import GPT2, run_file
from tests.cluster.test_invitations import invite, machine

LONG = run_file(model=GPT2, stages=[3], steps=5000, learning_rate=1e-3)


def join(cluster: Cluster, invitation: str = "", **settings: str) -> Process:
    """Starts ``dtfm-node join --device cpu,cpu``."""
    line = [sys.executable, "-m", "dtfm.node.cli", "join", "--threads", "1"]
    line += [] if settings else ["--device", "cpu,cpu"]
    supervisor = Process(line, cluster.folder, environment={**machine(cluster, "m", invitation), **settings})
    cluster._started.append(("m", supervisor))
    return supervisor


@pytest.mark.soak
def test_several_devices_train_leave_in_order_and_come_back_under_their_names(tmp_path: Path) -> None:
    with Cluster(tmp_path, LONG, nodes=["other"]) as cluster:
        supervisor = join(cluster, invite(cluster))  # good for one use
        cluster.wait_for("step_committed")
        first, second = sorted({e["node"] for e in cluster.of("node_joined")} - {"other"})
        assert (first[-4:], second) == ("-cpu", f"{first}2")
        measured = sorted(re.findall(r"(\[\w+\]) \S+ (\S+): .* GFLOP/s", supervisor.errors))
        assert measured == [("[cpu2]", second), ("[cpu]", first)]
        supervisor.send(signal.SIGTERM)
        assert supervisor.wait(60) == 0
        assert {e["node"]: e["reason"] for e in cluster.of("node_left")} == dict.fromkeys(
            (first, second), "in order: SIGTERM"
        )
        assert re.search(r"\[cpu\] \S+ SIGTERM: handing over", supervisor.errors)
        assert not cluster.of("step_aborted")
        begun = len(cluster.events)
        again = join(cluster)
        for name in (first, second):
            cluster.wait_for("node_ready", after=begun, where=lambda e, name=name: e["node"] == name)  # type: ignore[misc]
        again.send(signal.SIGTERM)
        assert again.wait(60) == 0


@pytest.mark.soak
def test_a_member_that_is_killed_leaves_the_others_alone(tmp_path: Path) -> None:
    with Cluster(tmp_path, LONG, nodes=["other"]) as cluster:
        supervisor = join(cluster, invite(cluster))
        cluster.wait_for("step_committed")
        killed, _ = children_of(supervisor.running.pid)
        before = len(cluster.events)
        os.kill(killed, signal.SIGKILL)
        supervisor.wait_for_error("has ended: killed by SIGKILL; ")
        assert "goes on" in supervisor.errors
        cluster.wait_for("node_left", after=before)
        now = cluster.of("step_committed")[-1]["step"]
        cluster.wait_for("step_committed", after=before, where=lambda e: e["step"] > now + 5)
        assert len(children_of(supervisor.running.pid)) == 1
        supervisor.send(signal.SIGTERM)
        assert supervisor.wait(60) == 1
        assert {e["reason"] for e in cluster.of("node_left")[1:]} == {"in order: SIGTERM"}


@pytest.mark.soak
def test_settings_from_the_environment_are_the_supervisors_and_each_node_takes_its_part_of_them(tmp_path: Path) -> None:
    port = free_port(together=2)
    settings = {
        "DTFM_DEVICE": "cpu,cpu",
        "DTFM_ID": "m",
        "DTFM_LISTEN": f"127.0.0.1:{port}",
    }
    with Cluster(tmp_path, LONG, nodes=["other"]) as cluster:
        supervisor = join(cluster, invite(cluster), **settings)
        cluster.wait_for("step_committed")
        assert {e["node"] for e in cluster.of("node_joined")} == {"other", "m-cpu", "m-cpu2"}
        for each in (port, port + 1):
            socket.create_connection(("127.0.0.1", each), timeout=10).close()
        supervisor.send(signal.SIGTERM)
        assert supervisor.wait(60) == 0

"""Coordinators are found on a local network: real processes, and multicast over a bridge between network namespaces."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dtfm.protos.invitation import read_invitation
from tests.cluster.launch import Cluster, Process
from tests.cluster.runs import run_file
from tests.wan.internet import Internet

pytestmark = [pytest.mark.usefixtures("internet", "nothing_left_running"), pytest.mark.timeout(240)]

LONG = run_file(stages=[1], steps=5000)


@contextmanager
def home(folder: Path, *options: str) -> Iterator[tuple[Internet, Cluster]]:
    """A coordinator and a node's machine behind one router."""
    with Internet() as net:
        net.router("home")
        for name in ("coordinator", "n"):
            net.host(name, behind="home")
        with Cluster(folder, LONG, address="0.0.0.0:7400", place=net.inside, invited=True, start=False) as cluster:
            cluster.start_coordinator(*options)
            yield net, cluster


def join(net: Internet, cluster: Cluster, invitation: str = "") -> Process:
    """``dtfm-node join``, without an address."""
    line = [sys.executable, "-m", "dtfm.node.cli", "join", "--threads", "1", "--device", "cpu", "--no-open-port"]
    environment = {"XDG_STATE_HOME": str(cluster.folder / "state-n"), "DTFM_INVITATION": invitation}
    environment["DTFM_ALLOW_DATA"] = str(cluster.folder)
    process = Process(net.inside("n", line), cluster.folder, environment=environment)
    cluster._started.append(("n", process))
    return process


def test_a_node_without_an_address_lists_the_run_and_later_finds_it_where_it_has_moved(tmp_path: Path) -> None:
    with home(tmp_path) as (net, cluster):
        address = net.address("coordinator")
        stranger = join(net, cluster)
        assert stranger.wait(60) == 2
        pin = read_invitation(cluster.invitation).pin.hex()
        assert f"run 'test' at {address}:7400, authority {pin[:12]}, dtfm " in stranger.errors
        assert "    dtfm-node join dtfm1...." in stranger.errors
        node = join(net, cluster, cluster.invitation)
        cluster.wait_for("step_committed")
        assert cluster.coordinator is not None
        for process in (node, cluster.coordinator):
            process.send(signal.SIGKILL)
            process.wait(20)
        cluster.address = "0.0.0.0:7500"
        begun = len(cluster.events)
        cluster.start_coordinator()
        again = join(net, cluster)
        cluster.wait_for("node_joined", after=begun)
        assert f"does not answer at {address}:7400" in again.errors
        assert f"Going on with the run at {address}:7500" in again.errors


def test_a_run_that_is_not_to_be_announced_is_not(tmp_path: Path) -> None:
    with home(tmp_path, "--no-announce") as (net, cluster):
        stranger = join(net, cluster)
        assert stranger.wait(60) == 2
        assert "no run announces itself on this network" in stranger.errors

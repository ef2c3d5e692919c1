"""Runs are found on a local network, and a coordinator that has moved there is found again: real processes, and real multicast
over a bridge between network namespaces."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dtfm.protos.identity.invitation import read_invitation
from dtfm.protos.local_network.announcement import fingerprint
from tests.cluster.launch import Cluster, Process
from tests.cluster.runs import run_file
from tests.wan.internet import Internet

pytestmark = [pytest.mark.usefixtures("internet", "nothing_left_running"), pytest.mark.timeout(240)]

LONG = run_file(stages=[1], steps=100_000)


@contextmanager
def home(folder: Path, *options: str) -> Iterator[tuple[Internet, Cluster]]:
    """A coordinator and the machine n behind one router, and the machine m behind another."""
    with Internet() as net:
        for name in ("home", "elsewhere"):
            net.router(name)
        for name in ("coordinator", "n", "liar"):
            net.host(name, behind="home")
        net.host("m", behind="elsewhere")
        with Cluster(folder, LONG, address="0.0.0.0:7400", place=net.inside, invited=True, start=False) as cluster:
            cluster.start_coordinator(*options)
            yield net, cluster


def join(net: Internet, cluster: Cluster, host: str, *options: str, user: str = "stranger") -> Process:
    """``dtfm-node join`` without an invitation."""
    line = [sys.executable, "-m", "dtfm.node.cli", "join", "--threads", "1", "--device", "cpu", *options]
    environment = {"XDG_STATE_HOME": str(cluster.folder / f"state-{user}"), "DTFM_INVITATION": ""}
    process = Process(net.inside(host, line), cluster.folder, environment=environment)
    cluster._started.append((host, process))
    return process


def test_who_has_no_invitation_hears_of_the_run_on_its_own_network_alone(tmp_path: Path) -> None:
    with home(tmp_path) as (net, cluster):
        address = net.address("coordinator")
        here, elsewhere = join(net, cluster, "n"), join(net, cluster, "m")
        assert (here.wait(60), elsewhere.wait(60)) == (2, 2)
        pin = read_invitation(cluster.invitation).pin
        assert f"run 'test', trains llama; owner's fingerprint {fingerprint(pin)}; at {address}:7400\n" in here.errors
        assert "\nan invitation is needed; ask" in here.errors
        assert "    dtfm-node join dtfm1...." in here.errors
        assert "no run announces itself on this network, and an invitation is needed" in elsewhere.errors


def test_hostile_answers_change_nothing(tmp_path: Path) -> None:
    with home(tmp_path) as (net, cluster):
        pin, own = read_invitation(cluster.invitation).pin, net.address("liar")
        said: list[bytes] = []
        command = net.inside("liar", [sys.executable, "-m", "tests.wan.impostor", pin.hex(), own])
        liar = Process(command, tmp_path, on_line=said.append)
        cluster._started.append(("liar", liar))
        liar.wait_for_error("here")
        node = cluster.add("n", "--no-open-port", "--give-up-after", "100")
        cluster.wait_for("step_committed")
        stranger = join(net, cluster, "n")
        assert stranger.wait(60) == 2
        lines = stranger.errors.splitlines()
        print(stranger.errors)
        assert len(lines) < 30
        assert all(line.isprintable() for line in lines)
        assert f"fingerprint {fingerprint(pin)}; at " in stranger.errors
        net.move("coordinator", "192.168.1.77")
        moved = len(cluster.events)
        node.wait_for_error("The coordinator has moved to 192.168.1.77:7400")
        cluster.wait_for("step_committed", after=moved)
        assert node.errors.count("The coordinator has moved to") == 1
        print(*said)
        assert b"lied\n" in said
        assert {line for line in said if line.startswith(b"told")} <= {b"told 0 bytes\n"}


def test_a_node_finds_the_coordinator_where_it_has_moved(tmp_path: Path) -> None:
    with home(tmp_path) as (net, cluster):
        node = cluster.add("n", "--no-open-port", "--give-up-after", "100")
        cluster.wait_for("step_committed")
        for address in ("192.168.1.77", "192.168.1.78"):
            net.move("coordinator", address)
            node.wait_for_error(f"The coordinator has moved to {address}:7400")
            moved = len(cluster.events)
            cluster.wait_for("step_committed", after=moved)
        node.send(signal.SIGKILL)
        node.wait(20)
        net.move("coordinator", "192.168.1.79")
        again = join(net, cluster, "n", "--allow-data", str(tmp_path), "--no-open-port", user="n")
        again.wait_for_error("The coordinator has moved to 192.168.1.79:7400")
        begun = len(cluster.events)
        cluster.wait_for("step_committed", after=begun)

"""Runs are found on a local network, and a coordinator that has moved there is found again: real processes, and real multicast
over a bridge between network namespaces."""

from __future__ import annotations

import signal
import subprocess
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

pytestmark = [pytest.mark.usefixtures("internet", "nothing_left_running")]

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
            assert cluster.coordinator is not None
            cluster.coordinator.wait_for_error("Announced on the local network")
            yield net, cluster


def join(
    net: Internet, cluster: Cluster, host: str, *options: str, user: str = "stranger", invitation: str = ""
) -> Process:
    """``dtfm-node join``, without an address."""
    line = [sys.executable, "-m", "dtfm.node.cli", "join", "--threads", "1", "--device", "cpu", *options]
    environment = {"XDG_STATE_HOME": str(cluster.folder / f"state-{user}"), "DTFM_INVITATION": invitation}
    process = Process(net.inside(host, line), cluster.folder, environment=environment)
    cluster._started.append((host, process))
    return process


def listed(net: Internet, cluster: Cluster, host: str) -> list[str]:
    """What a user without an invitation is shown there. On a busy machine an answer may be late, or lost in a flood of others:
    then the user tries again."""
    for _ in range(3):
        stranger = join(net, cluster, host)
        assert stranger.wait(60) == 2
        lines = stranger.errors.splitlines()
        assert len(lines) < 10
        if any(" run 'test'" in line for line in lines):
            break
    return lines


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


@pytest.mark.soak
def test_hostile_answers_change_nothing(tmp_path: Path) -> None:
    with home(tmp_path) as (net, cluster):
        pin, own = read_invitation(cluster.invitation).pin, net.address("liar")
        old = net.address("coordinator")
        said: list[bytes] = []
        command = net.inside("liar", [sys.executable, "-m", "tests.wan.impostor", pin.hex(), own])
        liar = Process(command, tmp_path, on_line=said.append)
        cluster._started.append(("liar", liar))
        liar.wait_for_error("here")
        node = cluster.add("n", "--no-open-port", "--give-up-after", "100")
        cluster.wait_for("step_committed")
        lines = listed(net, cluster, "n")
        assert len(lines) == 5
        assert all(line.isprintable() for line in lines)
        assert " run 'test', trains llama" in lines[1]
        assert lines[1].endswith(f"; owner's fingerprint {fingerprint(pin)}; at {net.address('coordinator')}:7400")
        net.move("coordinator", "192.168.1.77")
        moved = len(cluster.events)
        node.wait_for_error("The coordinator has moved to 192.168.1.77:7400")
        cluster.wait_for("step_committed", after=moved)
        assert node.errors.count("The coordinator has moved to") == 1
        net.move("liar", old)  # where the invitation leads, another's key is shown now
        joined = len(cluster.events)
        late = join(net, cluster, "n", "--id", "late", user="late", invitation=cluster.invitation)
        late.wait_for_error("The coordinator has moved to 192.168.1.77:7400")
        cluster.wait_for("node_joined", where=lambda e: e["node"] == "late", after=joined)
        assert "does not answer" not in late.errors
        assert b"lied\n" in said
        assert {line for line in said if line.startswith(b"told")} <= {b"told 0 bytes\n"}


@pytest.mark.soak
def test_who_joins_again_finds_the_coordinator_where_it_has_moved(tmp_path: Path) -> None:
    with home(tmp_path) as (net, cluster):
        node = cluster.add("n", "--no-open-port")
        cluster.wait_for("step_committed")
        node.send(signal.SIGKILL)
        node.wait(20)
        net.move("coordinator", "192.168.1.77")
        again = join(net, cluster, "n", "--allow-data", str(tmp_path), "--no-open-port", user="n")
        again.wait_for_error("The coordinator has moved to 192.168.1.77:7400")
        begun = len(cluster.events)
        cluster.wait_for("step_committed", after=begun)
        again.send(signal.SIGKILL)
        again.wait(20)
        begun = len(cluster.events)
        join(net, cluster, "n", "--allow-data", str(tmp_path), "--no-open-port", user="n")
        cluster.wait_for("node_joined", after=begun)


@pytest.mark.soak
def test_a_node_that_trains_follows_the_coordinator_from_address_to_address(tmp_path: Path) -> None:
    with home(tmp_path) as (net, cluster):
        node = cluster.add("n", "--no-open-port", "--give-up-after", "100")
        cluster.wait_for("step_committed")
        for address in ("192.168.1.77", "192.168.1.78", "192.168.1.79"):
            net.move("coordinator", address)
            node.wait_for_error(f"The coordinator has moved to {address}:7400")
            moved = len(cluster.events)
            cluster.wait_for("step_committed", after=moved)


HOLD_PORT = """
import socket, time
held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
held.bind(("", 5353))
print("held", flush=True)
time.sleep(1000)
"""


def test_where_the_network_cannot_be_told_a_line_says_so_and_the_run_goes_on(tmp_path: Path) -> None:
    with Internet() as net:
        net.router("home")
        for name in ("coordinator", "n"):
            net.host(name, behind="home")
        holder = net.run("coordinator", [sys.executable, "-c", HOLD_PORT], stdout=subprocess.PIPE)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with Cluster(tmp_path, LONG, address="0.0.0.0:7400", place=net.inside, invited=True, start=False) as cluster:
            cluster.start_coordinator("--announce")
            assert cluster.coordinator is not None
            cluster.coordinator.wait_for_error("The local network does not hear of this run: ")
            cluster.add("n", "--no-open-port")
            cluster.wait_for("step_committed")
            assert cluster.coordinator.errors.count("does not hear of this run") == 1
            print(next(line for line in cluster.coordinator.errors.splitlines() if "does not hear" in line))
        holder.stdout.close()

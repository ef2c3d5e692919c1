"""The run's state is lost, and real processes wait for its holders, or for an operator: nothing is given up silently."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.exact import assert_exact
from tests.cluster.faults import HOLD, Phase, fail
from tests.cluster.launch import Cluster, Process
from tests.cluster.replayed import losses_as_logged
from tests.cluster.runs import GPT2, losses_alone, run_at, run_file
from tests.cluster.test_life_cycle import command

STEPS = 14


def lines_of(cluster: Cluster, *words: str) -> str:
    """What an operator's command prints for people."""
    said: list[bytes] = []
    line = [sys.executable, "-m", "dtfm.coordinator.cli", *words, cluster.address]
    process = Process(line, cluster.folder, on_line=said.append)
    assert process.wait(30) == 0, process.errors
    return b"".join(said).decode()


def kill_all(cluster: Cluster) -> None:
    for node in cluster.nodes.values():
        node.send(signal.SIGKILL)
    for node in cluster.nodes.values():
        node.wait(10)


@pytest.mark.soak
def test_all_nodes_and_their_disks_are_lost_and_an_operator_goes_on_from_the_weights_at_home(tmp_path: Path) -> None:
    """Each loss equals one process's that goes on from these weights, with moments of zero."""
    text = run_file(model=GPT2, stages=[1, 1], steps=STEPS, storage="coordinator:", checkpoint_every=5)
    beyond = fail("a").at(step=8, phase=Phase.FORWARD).by(HOLD)
    with Cluster(tmp_path, text, nodes="ab", faults=[beyond]) as cluster:
        cluster.wait_for("checkpoint_written", where=lambda event: event["step"] == 5)
        cluster.wait_for("step_committed", where=lambda event: event["step"] == 7)
        kill_all(cluster)
        for name in "ab":
            cluster.add(name, environment={"XDG_CACHE_HOME": str(tmp_path / f"new-{name}")})
        asks = cluster.wait_for("waiting", where=lambda event: event["asks"])["reason"]
        assert (
            "nobody here has the state of step 7. To go on: `dtfm-coordinator continue --from weights`: from step 5"
            in asks
        )
        assert "2 steps are lost" in asks
        assert f"The run needs an operator: {asks}" in lines_of(cluster, "members")
        cluster.nodes["a"].wait_for_error("dtfm-coordinator continue --from weights")
        assert not cluster.of("rolled_back")
        assert "goes on from the weights of step 5" in command(cluster, "continue", "--from", "weights")["sentence"]
        assert cluster.finish() == 0
    log = cluster.log()
    assert [(event["step"], event["weights"]) for event in log if event["event"] == "rolled_back"] == [(5, True)]
    losses = [event["loss"] for event in log if event["event"] == "step_committed"]
    assert losses == pytest.approx([*losses_as_logged(run_at(cluster.run_file), log)], rel=1e-9, abs=0)
    assert cluster.check().findings == ()


@pytest.mark.soak
def test_a_node_with_an_older_disk_does_not_send_the_run_back_while_the_newer_disk_is_away(tmp_path: Path) -> None:
    """a is back with its disk as it was before, and c is new. b has all of a newer snapshot on its disk, and comes later."""
    text = run_file(model=GPT2, stages=[1, 1], steps=5000, storage="coordinator:", checkpoint_every=2, lease=1.0)
    caches = {name: {"XDG_CACHE_HOME": str(tmp_path / f"cache-{name}")} for name in "abc"}
    with Cluster(tmp_path, text, coordinator="tests.cluster.asks_at_once") as cluster:
        for name in "ab":
            cluster.add(name, environment=caches[name])
        older = cluster.wait_for("snapshot_written")
        shutil.copytree(tmp_path / "cache-a", tmp_path / "older-a")
        newer = cluster.wait_for(
            "snapshot_written", where=lambda event: event["spread"] and event["step"] > older["step"] + 2
        )
        kill_all(cluster)
        cluster.add("a", environment={"XDG_CACHE_HOME": str(tmp_path / "older-a")})
        cluster.add("c", environment=caches["c"])
        asks = cluster.wait_for("waiting", where=lambda event: event["asks"])["reason"]
        assert f"start b again, with part of step {newer['step']} on disk" in asks
        before = len(cluster.events)
        cluster.add("b", environment=caches["b"])
        cluster.wait_for("step_committed", after=before, where=lambda event: event["step"] > newer["step"])
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish() == 1
    assert {event["step"] for event in cluster.of("rolled_back")} <= {newer["step"]}
    assert_exact(cluster, 1e-9)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounts need root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_coordinator_that_is_started_again_while_its_disk_is_full_waits_and_goes_on(
    tmp_path: Path, small_disk: Path
) -> None:
    text = run_file(model=GPT2, stages=[1, 1], steps=STEPS)
    hold = fail("a").at(step=5, phase=Phase.FORWARD).by(HOLD)
    with Cluster(tmp_path, text, store=f"sqlite:///{small_disk}/store.db", nodes="ab", faults=[hold]) as cluster:
        cluster.wait_for("step_committed", where=lambda event: event["step"] == 4)
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGKILL)
        cluster.coordinator.wait(10)
        filler = small_disk / "filler"
        with filler.open("wb") as file:
            room = os.statvfs(small_disk)
            os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
        cluster.coordinator = cluster.start_another(cluster.address)
        cluster.coordinator.wait_for_error(f"the disk is full: make room in {small_disk}")
        assert cluster.coordinator.running.poll() is None
        filler.unlink()
        cluster.wait_for("run_resumed")
        cluster.let_go(hold)
        assert cluster.finish() == 0
    assert not cluster.of("rolled_back")
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9, abs=0)

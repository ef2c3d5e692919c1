"""Links are too slow for a standby, and a stage's only replica dies: the run goes on from a snapshot on the nodes' own disks."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster.exact import assert_exact
from tests.cluster.launch import Cluster, Event
from tests.cluster.ports import free_port
from tests.cluster.relay import Relay
from tests.cluster.runs import GPT2, run_file

RATE = 1e6
"""Bytes per second to each node. At this rate a step's activations alone keep a link busy, so no node can be a standby."""


@contextmanager
def slow_links(*names: str) -> Iterator[Mapping[str, tuple[str, ...]]]:
    """By node, the options that make others reach it through a slow relay."""
    with ExitStack() as stack:
        options = {}
        for name in names:
            port = free_port()
            relay = stack.enter_context(Relay(port, RATE))
            options[name] = ("--listen", f"127.0.0.1:{port}", "--advertise", f"127.0.0.1:{relay.port}")
        yield options


def bring_back(cluster: Cluster, name: str, *options: str, cache: Path | None = None) -> Event:
    """Starts a node that was killed, waits for the next commit, and returns the roll-back. ``cache``: where its disk is now."""
    before = len(cluster.events)
    cluster.add(name, *options, environment=None if cache is None else {"XDG_CACHE_HOME": str(cache)})
    rolled = cluster.wait_for("rolled_back", after=before)
    cluster.wait_for("step_committed", after=before, where=lambda e: e["step"] > rolled["step"])
    return rolled


def kill(cluster: Cluster, name: str) -> None:
    before = len(cluster.events)
    cluster.nodes[name].send(signal.SIGKILL)
    cluster.nodes[name].wait(10)
    cluster.wait_for("node_left", after=before)


@pytest.mark.soak
def test_all_stages_roll_back_to_the_snapshot_on_disks_and_a_node_with_its_own_disk_fetches_nothing(
    tmp_path: Path,
) -> None:
    text = run_file(model=GPT2, stages=[1, 1], steps=5000, learning_rate=1e-3, lease=1.0)
    with slow_links("a", "b") as links, Cluster(tmp_path, text) as cluster:
        for name in "ab":
            cluster.add(name, *links[name])
        stages = cluster.wait_for("plan_adopted")["plan"]["stages"]
        victim: str = max(stages, key=lambda stage: stage["layers"][1] - stage["layers"][0])["replicas"][0]
        kept = cluster.wait_for("snapshot_written")
        assert kept["holders"].keys() == {"a", "b"}
        cluster.wait_for("step_committed", where=lambda e: e["step"] >= kept["step"] + 3)

        kill(cluster, victim)
        with_disk = bring_back(cluster, victim, *links[victim])
        cluster.nodes[victim].wait_for_error(" buckets are on this disk, 0 come from others")

        kill(cluster, victim)
        without_disk = bring_back(cluster, victim, *links[victim], cache=tmp_path / "empty")
        cluster.nodes[victim].wait_for_error(": 0 buckets are on this disk, ")

        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish() == 1
    for rolled in (with_disk, without_disk):
        step = max(e["step"] for e in cluster.of("snapshot_written") if e["sequence"] < rolled["sequence"])
        lost = rolled["from_step"] - step
        assert rolled["step"] == step
        again = "1 step is" if lost == 1 else f"{lost} steps are"
        assert rolled["reason"].endswith(f"; {again} trained again from the disks' snapshot of step {step}")
    assert_exact(cluster)

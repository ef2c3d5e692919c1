"""What people read on a day with a kill, a restart and a relay has no sentence that a program would write."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.cluster.launch import Cluster, Process
from tests.cluster.runs import GPT2, run_file

ODD = {
    r"\b1 (steps|micro-batches|nodes|layers|links|samples)\b": "one of several",
    r"\(\)|  +:|: *$|\bNone\b|\bnan\b": "a value that is missing",
    r"\b0\.0 (GiB|MiB|GB|s)\b": "something that is not nothing",
    r"NODE_LEFT": "the name of a constant where a sentence should be",
    r"^(\S+ left).*\bon \S+: \1": "the same twice",
    r"put an IPv6 host in brackets": "a hint for something else",
}


def odd_lines(text: str) -> list[str]:
    return [f"{why}: {line}" for line in text.splitlines() for pattern, why in ODD.items() if re.search(pattern, line)]


def test_the_patterns_find_what_was_once_printed() -> None:
    for once in (
        "step 5 was aborted: NODE_LEFT on boxB: boxB left",
        "1 steps are trained again",
        "run 'x': loading its data (a.txt) and its model ()",
        "relay joined from 10.0.0.1:7: relay (cpu, 0.0 GiB, 0 GFLOP/s)",
    ):
        assert odd_lines(once), once


@pytest.mark.soak
def test_a_day_with_a_kill_a_restart_and_a_relay(tmp_path: Path) -> None:
    steps = 60
    text = run_file(model=GPT2, stages=[1, 1], steps=steps, storage="coordinator:", checkpoint_every=20)
    with Cluster(tmp_path, text, nodes="ab") as cluster:
        cluster.add_relay("r")
        cluster.wait_for("node_joined", where=lambda e: e["node"] == "r")
        cluster.wait_for("step_committed")
        cluster.nodes["b"].send(signal.SIGKILL)
        cluster.wait_for("node_left", where=lambda e: e["node"] == "b")
        cluster.add("b")
        begun = len(cluster.events)
        cluster.wait_for("step_committed", after=begun)
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        cluster.coordinator.wait(20)
        cluster.start_coordinator()
        cluster.wait_for("step_committed", after=begun)
        assert cluster.finish() == 0
        told: list[bytes] = []
        shown = Process(
            [sys.executable, "-m", "dtfm.coordinator.cli", "events", "--store", cluster.store],
            tmp_path,
            on_line=told.append,
        )
        assert shown.wait(60) == 0
        said = [process.errors for _, process in cluster._started]
    events = b"".join(told).decode()
    found = odd_lines("\n".join([events, *said]))
    assert not found, "\n".join(found)
    assert len(re.findall(r"\b[ab] joined from .*first contact", events)) == 2, (
        "each node comes for the first time once"
    )
    refused = Process(
        [sys.executable, "-m", "dtfm.node.cli", "join", "http://127.0.0.1:7480/", "--id", "c"], tmp_path, fresh=True
    )
    assert refused.wait(60) == 2
    assert refused.errors.startswith("'http://127.0.0.1:7480/' is not an address but a URL: give HOST:PORT alone")

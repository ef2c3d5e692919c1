"""How long the loss of a node delays training: ``python -m tests.bench.recovery [--kills 20] [--silences 5] [--samples 20]
[--device cuda] [--json]``.

Four nodes, two stages of two replicas, on this machine. Nodes are killed one after the other, at any moment of a step; the seed
decides which and when. (A kill resets the connections immediately.) Each returns as a new process. Then some nodes fall silent
(SIGSTOP) until they are given up, and continue. Redone micro-batches are the ones that had gone backward, at survivors or at
the killed node, and whose gradients are lost. More ``--samples`` make longer steps. Whatever a step takes, the system needs
some 0.08 s to end a killed process, and the coordinator some 0.06 s to begin anew.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.bench.rows import Row, show
from tests.cluster.launch import Cluster, Event
from tests.cluster.nursery import close_nursery
from tests.cluster.recoveries import commits, contribution, median_and_worst, until_commit_without
from tests.cluster.runs import GLOBAL_BATCH, GPT2, MICRO_BATCH, run_file

NODES = ("a", "b", "c", "d")
STAGES = 2
LEASE = 2.0
QUIET_STEPS = 10
"""Steps between a return and the next loss."""
ALLOWED_SECONDS = 0.3
"""The seconds allowed beyond one undisturbed iteration, and beyond the lease if no connection was reset."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a node. ``at`` in seconds of the wall clock."""

    node: str
    at: float


class Ordeal:
    """A cluster that loses its nodes, one at a time."""

    def __init__(self, cluster: Cluster, device: str) -> None:
        self._cluster = cluster
        self._device = device
        self._lives = dict.fromkeys(NODES, 0)
        for node in NODES:
            self._start(node)
        self._await_all(0)

    def kill(self, node: str, part_of_step: float) -> Loss:
        """Kills the node. ``part_of_step``: how long after a commit, as a part of the recent steps' duration."""
        seconds = [event["seconds"] for event in self._cluster.of("step_committed")[-QUIET_STEPS:]]
        time.sleep(part_of_step * statistics.median(seconds))
        loss = Loss(node, time.time())
        left = self._lose(node, signal.SIGKILL)
        self._start(node)
        self._await_all(left)
        return loss

    def silence(self, node: str) -> Loss:
        loss = Loss(node, time.time())
        left = self._lose(node, signal.SIGSTOP)
        self._cluster.nodes[node].send(signal.SIGCONT)
        self._await_all(left)
        return loss

    def _start(self, node: str) -> None:
        self._lives[node] += 1
        self._cluster.add(node, "--device", self._device, "--trace", f"{node}-{self._lives[node]}.trace")

    def _lose(self, node: str, number: signal.Signals) -> int:
        """Waits until the others have committed a step. Returns the number of the event that says that ``node`` left."""
        begun = len(self._cluster.events)
        self._cluster.nodes[node].send(number)
        gone = self._cluster.wait_for("node_left", where=lambda e: e["node"] == node, after=begun)
        left = self._cluster.events.index(gone)
        self._cluster.wait_for("step_committed", where=lambda e: node not in e["compute_seconds"], after=left)
        return left

    def _await_all(self, after: int) -> None:
        """Waits until all nodes have trained together for some steps, from event number ``after`` on."""
        together = self._cluster.wait_for("step_committed", where=by_all, after=after)
        self._cluster.wait_for("step_committed", where=lambda e: e["step"] == together["step"] + QUIET_STEPS)


def by_all(committed: Event) -> bool:
    return set(committed["compute_seconds"]) == set(NODES)


def done_again(folder: Path, step: int, dead: str, micro_batches: float) -> tuple[float, float]:
    """The micro-batches of ``step`` that went backward more often than needed: (at survivors, at all nodes). One stage of a
    micro-batch counts as a part of it."""
    backwards: Counter[bool] = Counter()
    for trace in folder.glob("*.trace"):
        for line in trace.read_text().splitlines():
            try:
                span = json.loads(line.strip("[,"))
            except ValueError:
                continue  # the last line of a process that was killed
            if span.get("cat") == "backward" and span["args"]["step"] == step:
                backwards[span["pid"] == dead] += 1
    return max(0.0, backwards[False] / STAGES - micro_batches), backwards.total() / STAGES - micro_batches


def interrupted_step(events: list[Event], loss: Loss) -> int:
    """The step that was first committed without the node that was lost."""
    return next(
        int(e["step"]) for e in commits(events) if e["time"] > loss.at and loss.node not in e["compute_seconds"]
    )


def measure(folder: Path, kills: int, silences: int, samples: int, seed: int, device: str) -> list[Row]:
    chance = random.Random(seed)
    text = run_file(model=GPT2, stages=[2, 2], steps=1_000_000, learning_rate=1e-3, lease=LEASE)
    text = text.replace(f"global_batch = {GLOBAL_BATCH}\n", f"global_batch = {samples}\n")
    micro_batches = samples / MICRO_BATCH
    with Cluster(folder, text, fresh=device != "cpu") as cluster:  # CUDA survives no fork
        ordeal = Ordeal(cluster, device)
        killed = [ordeal.kill(chance.choice(NODES), chance.random()) for _ in range(kills)]
        silenced = [ordeal.silence(chance.choice(NODES)) for _ in range(silences)]
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        cluster.finish()
    events = cluster.log()
    assert cluster.check().findings == ()
    iteration = statistics.median(e["seconds"] for e in commits(events) if by_all(e))
    after_kill = [until_commit_without(events, loss.node, loss.at) for loss in killed]
    after_silence = [until_commit_without(events, loss.node, loss.at) for loss in silenced]
    again = [done_again(folder, interrupted_step(events, loss), loss.node, micro_batches) for loss in killed]
    returns = [contribution(events, loss.node, loss.at) for loss in killed]
    joining = [first - joined for joined, first in returns]
    by_reset, by_silence = iteration + ALLOWED_SECONDS, iteration + ALLOWED_SECONDS + LEASE
    allowed = f"iteration + {ALLOWED_SECONDS} s"
    return [
        Row("iteration, undisturbed, median", iteration, "s"),
        *median_and_worst("kill to next commit", after_kill, "s", allowed, by_reset),
        *median_and_worst("silence to next commit", after_silence, "s", f"{allowed} + lease", by_silence),
        *median_and_worst("micro-batches redone by survivors", [own for own, _ in again], "", "a step", micro_batches),
        *median_and_worst("micro-batches redone by all", [both for _, both in again], "", "a step", micro_batches),
        *median_and_worst("join to first step", joining, "s", "iteration", iteration),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--silences", type=int, default=5)
    parser.add_argument("--samples", type=int, default=GLOBAL_BATCH, help=f"of a step; a multiple of {MICRO_BATCH}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="that the nodes share: cpu, cuda or cuda:N")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    if arguments.kills < 1 or arguments.silences < 1:
        parser.error("at least one kill and one silence")
    if arguments.samples < MICRO_BATCH or arguments.samples % MICRO_BATCH:
        parser.error(f"--samples must be a multiple of {MICRO_BATCH}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(
                Path(folder), arguments.kills, arguments.silences, arguments.samples, arguments.seed, arguments.device
            )
    finally:
        close_nursery()
    show(f"Recovery: 4 nodes, 2 stages, lease {LEASE:g} s, {os.cpu_count()} cores", rows, arguments.json)


if __name__ == "__main__":
    main()

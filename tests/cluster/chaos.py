"""Nodes are killed and return.

Real processes on this machine. They first train undisturbed for a while, which gives the throughput to compare with. Then one
node is killed in every period (20 seconds, unless told otherwise) and returns in the same one. A shared machine drifts, so the
throughput is also compared with the quiet stretches, from each return to the next kill. (Where there are fewer cores
than nodes, the nodes that are left run faster, and keep more than their share.)

The seed decides who dies, and when in its period. The first node is spared, so that there is always one whose memory and open
files can be compared.
"""

from __future__ import annotations

import random
import signal
import statistics
import threading
import time
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Self

from tests.cluster.launch import Cluster, Event
from tests.cluster.leaks import connections, open_files, processes_in, resident_bytes
from tests.cluster.recoveries import (
    commits,
    committed_between,
    contribution,
    mean_members,
    until_commit_without,
)
from tests.cluster.runs import GPT2, run_file

PERIOD = 20.0
_ABSENT = 0.4
"""Part of a period from a kill to the start of the node's next process."""
_RETURNING = 0.25
"""Part of a period that is left for the return."""
_SAMPLES_EVERY = 0.5
"""Seconds between two records of resident memory."""
_CALM = (5.0, 30.0)
"""Seconds of undisturbed training: a twelfth of the chaos, within these bounds."""


@dataclass(frozen=True, slots=True)
class Kill:
    """``at``: seconds after chaos began."""

    node: str
    at: float


@dataclass(frozen=True, slots=True)
class Report:
    """Rates are committed steps per second: ``calm_rate`` before chaos, ``rate`` in chaos, ``quiet_rate`` in its quiet
    stretches. ``presence``: the mean share of the nodes that were members in chaos. ``recovery``: seconds from each kill to the
    next commit. ``contribution``: seconds from each return to the first step in which the node took part. The last two are of
    the coordinator and of the spared node, since the first return: open files gained, and bytes of memory gained per step.
    ``connections`` are theirs at the end: which nodes talk to which depends on the plan's flows, so these are not counted as
    files."""

    steps: int
    calm_rate: float
    quiet_rate: float
    rate: float
    presence: float
    missing_samples: int
    findings: tuple[str, ...]
    digest_mismatches: int
    recovery: tuple[float, ...]
    contribution: tuple[float, ...]
    processes_left: tuple[str, ...]
    file_growth: Mapping[str, int]
    memory_slope: Mapping[str, float]
    connections: Mapping[str, int]


def schedule_of_kills(seed: int, seconds: float, nodes: tuple[str, ...], period: float = PERIOD) -> list[Kill]:
    """One in each whole period, early enough for the node to return in the same one; never of the first node."""
    chance = random.Random(seed)
    return [
        Kill(chance.choice(nodes[1:]), period * (number + chance.uniform(0, 1 - _ABSENT - _RETURNING)))
        for number in range(int(seconds / period))
    ]


def run_chaos(folder: Path, seconds: float, seed: int, count: int = 6, period: float = PERIOD) -> Report:
    """Trains in ``folder`` with ``count`` nodes in two stages."""
    nodes = tuple(f"n{number}" for number in range(count))
    stages = [count - count // 2, count // 2]
    text = run_file(model=GPT2, stages=stages, steps=1_000_000, learning_rate=1e-3, lease=10.0)
    kills = schedule_of_kills(seed, seconds, nodes, period)
    with Cluster(folder, text, nodes=nodes) as cluster:
        warm = cluster.wait_for("step_committed", where=lambda e: e["step"] == 10)
        calm = min(max(seconds / 12, _CALM[0]), _CALM[1])
        began = cluster.wait_for("step_committed", where=lambda e: e["time"] >= warm["time"] + calm)
        witnesses = {name: _process(cluster, name) for name in ("coordinator", nodes[0])}
        files_before = dict.fromkeys(witnesses, 0)
        died_at = []
        with Memory(witnesses) as memory:
            for number, kill in enumerate(kills):
                sleep_until(began["time"] + kill.at)
                if number <= 1:  # the second time, as one node has died and returned by then
                    files_before = {name: open_files(pid) for name, pid in witnesses.items()}
                died_at.append(time.time())
                cluster.nodes[kill.node].send(signal.SIGKILL)
                cluster.nodes[kill.node].wait(10)
                sleep_until(began["time"] + kill.at + _ABSENT * period)
                cluster.add(kill.node)
            sleep_until(began["time"] + seconds)
            ended = time.time()
            whole = cluster.wait_for(
                "step_committed", where=lambda e: e["time"] > ended and len(e["compute_seconds"]) == count
            )
        file_growth = {name: open_files(pid) - files_before[name] for name, pid in witnesses.items()}
        connected = {name: connections(pid) for name, pid in witnesses.items()}
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish() == 1
    events = cluster.log()
    audited = cluster.check()
    returns = [contribution(events, kill.node, at) for kill, at in zip(kills, died_at, strict=True)]
    quiet = list(zip((first for _, first in returns), [*died_at[1:], whole["time"]], strict=True))
    chaos_lasted = whole["time"] - began["time"]
    return Report(
        steps=audited.steps,
        calm_rate=committed_between(events, warm["time"], began["time"]) / (began["time"] - warm["time"]),
        quiet_rate=sum(committed_between(events, *stretch) for stretch in quiet) / sum(b - a for a, b in quiet),
        rate=committed_between(events, began["time"], whole["time"]) / chaos_lasted,
        presence=mean_members(events, began["time"], whole["time"]) / count,
        missing_samples=audited.steps * 20 - audited.samples,
        findings=tuple(finding.sentence for finding in audited.findings),
        digest_mismatches=sum(event["event"] == "digest_mismatch" for event in events),
        recovery=tuple(until_commit_without(events, k.node, at) for k, at in zip(kills, died_at, strict=True)),
        contribution=tuple(first - joined for joined, first in returns),
        processes_left=tuple(processes_in(folder)),
        file_growth=file_growth,
        memory_slope=memory.slopes(events, since=returns[0][1]),
        connections=connected,
    )


class Memory:
    """A context that records the resident memory of some processes over time."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._processes = processes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._samples: dict[str, list[tuple[float, int]]] = {name: [] for name in processes}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(10)

    def slopes(self, events: Sequence[Event], since: float) -> Mapping[str, float]:
        """By process: bytes gained per committed step from the time ``since`` on."""
        times = [event["time"] for event in commits(events)]
        return {
            name: slope([(bisect(times, at), size) for at, size in samples if at >= since])
            for name, samples in self._samples.items()
        }

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLES_EVERY):
            for name, pid in self._processes.items():
                self._samples[name].append((time.time(), resident_bytes(pid)))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between any two points (Theil and Sen's estimator), which a few outliers do not move."""
    return statistics.median((d - b) / (c - a) for (a, b), (c, d) in combinations(points, 2) if c > a)


def sleep_until(moment: float) -> None:
    """Waits for a time of the wall clock. (Kills come when they are due, whatever the nodes are doing.)"""
    time.sleep(max(0.0, moment - time.time()))


def _process(cluster: Cluster, name: str) -> int:
    process = cluster.coordinator if name == "coordinator" else cluster.nodes[name]
    assert process is not None
    return process.running.pid

"""Kills and returns, one of each every 20 seconds: ``python -m tests.cluster.chaos --seconds 600 --seed 1 [--json]``.

Real processes on this machine. First they train undisturbed for a while, which gives the throughput to compare with; then
chaos begins. As a shared machine drifts, the throughput is compared with that of the quiet stretches too, from each return
to the next kill. (Where processors are fewer than nodes, those that are left run faster, and keep more than their share.)

Who dies, and when in its 20 seconds, follows from the seed; the first node is spared, so that there is always one whose
memory and open files can be compared. What comes out is one table.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.bench.rows import Row, show
from tests.cluster.launch import Cluster
from tests.cluster.leaks import open_files, processes_in, resident_bytes
from tests.cluster.nursery import close_nursery
from tests.cluster.recoveries import (
    committed_between,
    contribution,
    mean_members,
    median_and_worst,
    until_commit_without,
)
from tests.cluster.runs import GPT2, run_file

PERIOD = 20.0
ABSENT = 8.0
"""Seconds from a kill to the start of its successor."""
_CALM = (5.0, 30.0)
"""Seconds of undisturbed training: a twelfth of the chaos within these bounds."""


@dataclass(frozen=True, slots=True)
class Kill:
    """``at``: seconds after chaos began."""

    node: str
    at: float


@dataclass(frozen=True, slots=True)
class Report:
    """Rates in committed steps per second: ``calm_rate`` before chaos, ``rate`` in it, ``quiet_rate`` in it while nothing
    happened. ``presence``: mean share of the nodes that were members in chaos. ``recovery``: seconds from each kill to the next
    commit, ``contribution``: from each return to the first step with a part of its. Growth is of the coordinator and the
    spared node, whichever is larger, since the first return."""

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
    memory_growth: Mapping[str, int]


def schedule_of_kills(seed: int, seconds: float, nodes: tuple[str, ...]) -> list[Kill]:
    """One in each whole period, early enough for its successor to come in the same one; never of the first node."""
    chance = random.Random(seed)
    return [
        Kill(chance.choice(nodes[1:]), number * PERIOD + chance.uniform(0, PERIOD - ABSENT - 5))
        for number in range(int(seconds / PERIOD))
    ]


def run_chaos(folder: Path, seconds: float, seed: int, count: int = 6) -> Report:
    """Trains in ``folder`` with ``count`` nodes in two stages."""
    nodes = tuple(f"n{number}" for number in range(count))
    stages = [count - count // 2, count // 2]
    text = run_file(model=GPT2, stages=stages, steps=1_000_000, learning_rate=1e-3, lease=10.0)
    kills = schedule_of_kills(seed, seconds, nodes)
    with Cluster(folder, text, nodes=nodes) as cluster:
        warm = cluster.wait_for("step_committed", where=lambda e: e["step"] == 10)
        calm = min(max(seconds / 12, _CALM[0]), _CALM[1])
        began = cluster.wait_for("step_committed", where=lambda e: e["time"] >= warm["time"] + calm)
        witnesses = {name: _process(cluster, name) for name in ("coordinator", nodes[0])}
        files_before, memory_before = dict.fromkeys(witnesses, 0), dict.fromkeys(witnesses, 0)
        died_at = []
        for number, kill in enumerate(kills):
            sleep_until(began["time"] + kill.at)
            if number <= 1:  # once one has died and returned, if there is time for two: then all is as it will be
                files_before = {name: open_files(pid) for name, pid in witnesses.items()}
                memory_before = {name: resident_bytes(pid) for name, pid in witnesses.items()}
            died_at.append(time.time())
            cluster.nodes[kill.node].send(signal.SIGKILL)
            cluster.nodes[kill.node].wait(10)
            sleep_until(began["time"] + kill.at + ABSENT)
            cluster.add(kill.node)
        sleep_until(began["time"] + seconds)
        ended = time.time()
        whole = cluster.wait_for(
            "step_committed", where=lambda e: e["time"] > ended and len(e["compute_seconds"]) == count
        )
        file_growth = {name: open_files(pid) - files_before[name] for name, pid in witnesses.items()}
        memory_growth = {name: resident_bytes(pid) - memory_before[name] for name, pid in witnesses.items()}
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish() == 1
    events = cluster.log()
    audited = cluster.audit()
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
        memory_growth=memory_growth,
    )


def sleep_until(moment: float) -> None:
    """Chaos keeps time: its kills come when they are due, whatever the nodes are doing."""
    time.sleep(max(0.0, moment - time.time()))


def _process(cluster: Cluster, name: str) -> int:
    process = cluster.coordinator if name == "coordinator" else cluster.nodes[name]
    assert process is not None
    return process.running.pid


def rows(report: Report) -> list[Row]:
    scaled = {"undisturbed": report.calm_rate, "quiet stretches": report.quiet_rate}
    return [
        Row("steps committed", report.steps, ""),
        Row("throughput undisturbed", report.calm_rate, "steps/s"),
        Row("throughput of quiet stretches", report.quiet_rate, "steps/s"),
        Row("throughput in chaos", report.rate, "steps/s", "undisturbed", report.rate / report.calm_rate),
        *(
            Row(
                "throughput in chaos",
                report.rate,
                "steps/s",
                f"{name} x nodes present",
                report.rate / rate / report.presence,
            )
            for name, rate in scaled.items()
        ),
        Row("samples lost or doubled", report.missing_samples, ""),
        Row("findings of the audit", len(report.findings), ""),
        Row("digest mismatches", report.digest_mismatches, ""),
        *median_and_worst("kill to next commit", report.recovery, "s", "undisturbed step", 1 / report.calm_rate),
        *median_and_worst("join to first step", report.contribution, "s", "undisturbed step", 1 / report.calm_rate),
        Row("processes left", len(report.processes_left), ""),
        *(Row(f"open files gained, {name}", gained, "") for name, gained in report.file_growth.items()),
        *(Row(f"memory gained, {name}", gained / 2**20, "MiB") for name, gained in report.memory_growth.items()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="of chaos; at least 20")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    if arguments.seconds < PERIOD or arguments.nodes < 3:
        parser.error(f"at least {PERIOD:.0f} seconds and 3 nodes, or nobody is killed")
    try:
        with tempfile.TemporaryDirectory() as folder:
            report = run_chaos(Path(folder), arguments.seconds, arguments.seed, arguments.nodes)
    finally:
        close_nursery()
    for finding in report.findings:
        print(finding)
    title = f"Chaos: {arguments.nodes} nodes, {arguments.seconds:.0f} s, seed {arguments.seed}, {os.cpu_count()} cores"
    show(title, rows(report), arguments.json)


if __name__ == "__main__":
    main()

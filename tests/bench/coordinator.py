"""The load that one coordinator can carry: ``python -m tests.bench.coordinator [--json] [--nodes 1000] [--storm 200]``.

- Restart: the time from the start of ``dtfm-coordinator serve`` on a log of 100,000 events until it says "listening", with and
  without a snapshot in the store. Each is the median of several starts, which alternate.
- Heartbeats: nodes without models, each with its own gRPC stream and connection, send heartbeats at the default lease. A
  heartbeat's time begins when it is handed to gRPC in the nodes' process. It ends when the coordinator's tick has taken it. The
  coordinator runs on one core.
- Join storm: many nodes join within a second while a few nodes train. It counts the plans that follow, and times the steps
  until the plan with the new nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Self

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.store import Store
from dtfm.coordinator.view.story_snapshot import story_in, take
from dtfm.protos.run_file.run_file import parse_run
from dtfm.scheduler.model.plan import Stage, from_routes
from dtfm.scheduler.model.workload import Layer, Workload
from tests.bench.crowd import Crowd
from tests.bench.rows import Row, show

ROOT = Path(__file__).parents[2]
EVENTS = 100_000
RESTARTS = 5
PRIORITY = -10
"""The priority of these processes, where they may set it, so that other work on a shared machine disturbs them less."""
JOINS_PER_SECOND = 20
BEATING_SECONDS = 30.0
PARTS = 6
PART_SECONDS = BEATING_SECONDS / PARTS
STEP_SECONDS = 0.2
SETTLING_SECONDS = 15.0
LONGEST_WAIT_SECONDS = 120.0
MICRO_BATCH = 2
GLOBAL_BATCH = 512
FEW = 4
"""The number of nodes that train when the storm comes."""


def log_of_a_long_run(nodes: int = 16) -> Iterator[ev.Event]:
    """Endless events: nodes join, a plan of two stages is adopted, then steps follow, with a checkpoint every 100 steps."""
    names = [f"node-{number:02d}" for number in range(nodes)]
    device = ev.DeviceSeen("cpu", "a cpu", 1 << 33, 1e11)
    run = parse_run({"train": {"steps": 100_000_000}}, "the benchmark")
    yield ev.RunStarted("bench", run.model_dump(mode="json"))
    for index, name in enumerate(names):
        yield ev.NodeJoined(name, "first contact", "10.0.0.1:7000", device, "0", "0123456789abcdef")
        pairs = [pair for peer in names[:index] for pair in ((name, peer), (peer, name))]
        yield ev.LinksMeasured(name, tuple(ev.Link(a, b, 0.0123, 1.2345e9) for a, b in pairs))
        yield ev.NodeReady(name)
    layers = tuple(Layer(f"layer {number}", 1.5e9, 1e6, 1e5) for number in range(10))
    yield ev.RunDescribed(ev.Described(Workload(layers, nodes // 2), "ab" * 16, 1000, 100, 3.2, 256, 10))
    first, second = tuple(names[: nodes // 2]), tuple(names[nodes // 2 :])
    routes = [(pair, 1) for pair in zip(first, second, strict=True)]
    plan = from_routes(1, (Stage((0, 5), first, ()), Stage((5, 10), second, ())), routes)
    yield ev.PlanAdopted(1, plan, "the benchmark's", 0, 1.5, 1.25)
    yield ev.PlanStarted(1, 1)
    step = 0
    while True:
        step += 1
        computing = dict.fromkeys(names, 1.0123456789)
        yield ev.StepCommitted(step, 1, 2.3456789, 8192, 0.456789, 1.23456789, 32, computing, dict(computing))
        if step % 100 == 0:
            yield ev.CheckpointWritten(step, f"file:///checkpoints/step-{step:08d}", "ab12")


def restart_seconds(folder: Path, *, with_snapshot: bool) -> float:
    """Starts a coordinator on the log in ``folder``; returns the seconds until it listens, and kills it."""
    if not with_snapshot:
        connection = sqlite3.connect(folder / "dtfm.db")
        with connection:
            connection.execute("DELETE FROM snapshots")
        connection.close()
    command = [sys.executable, "-m", "dtfm.coordinator.cli", "serve", "--json", "--listen", "127.0.0.1:0"]
    began = time.monotonic()
    with subprocess.Popen(
        [*command, "--store", f"sqlite:///{folder}/dtfm.db"], stdout=subprocess.PIPE, cwd=folder, env=environment()
    ) as process:
        assert process.stdout is not None
        try:
            while json.loads(process.stdout.readline())["event"] != "listening":
                pass
            return time.monotonic() - began
        finally:
            process.kill()


def restart_rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = islice(log_of_a_long_run(), EVENTS)
        with Store(f"sqlite:///{folder}/dtfm.db", write=True) as store:
            while batch := list(islice(log, 1000)):
                store.append(batch)
            snapshot = take(story_in(store.url))
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(RESTARTS):
            seconds[False].append(restart_seconds(folder, with_snapshot=False))
            with Store(f"sqlite:///{folder}/dtfm.db", write=True) as store:
                store.keep(snapshot)
            seconds[True].append(restart_seconds(folder, with_snapshot=True))
    without, kept = statistics.median(seconds[False]), statistics.median(seconds[True])
    yield Row(f"restart, {EVENTS:,} events, whole log", without, "s")
    yield Row(f"restart, {EVENTS:,} events, snapshot", kept, "s", "whole log", kept / without)
    yield Row(f"restart, {EVENTS:,} events, snapshot, worst of {RESTARTS}", max(seconds[True]), "s")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


class Coordinator:
    """A timed coordinator in a separate process, on the first of this process's cores."""

    def __init__(self, folder: Path, nodes: int, stages: str) -> None:
        (folder / "run.toml").write_text(
            f"""
            [train]
            steps = 1000000
            global_batch = {GLOBAL_BATCH}
            micro_batch = {MICRO_BATCH}
            evaluate_every = 0
            [cluster]
            nodes = {nodes}
            stages = {stages}
            [checkpoint]
            uri = "{(folder / "checkpoints").as_uri()}"
            every = 0
            """
        )
        core = str(min(os.sched_getaffinity(0)))
        command = [sys.executable, "-m", "tests.bench.timed_coordinator", str(folder), core]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=environment())
        self._said: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        assert self._process.stdout is not None
        self._output = self._process.stdout

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(asyncio.to_thread(self._read, asyncio.get_running_loop()))
        self.invitation = str((await self.said("listening"))["invitation"])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        await self._reading

    def count(self, event: str) -> int:
        return sum(e["event"] == event for e in self._said)

    async def said(self, event: str, times: int = 1) -> dict[str, Any]:
        """Waits until ``times`` events of this name have come; returns the last of them."""
        deadline = time.monotonic() + LONGEST_WAIT_SECONDS
        while len(found := [e for e in self._said if e["event"] == event]) < times:
            if self._process.poll() is not None:
                raise RuntimeError("the coordinator ended")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{times} x {event} did not come; {len(found)} did")
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), 1.0)
        return found[times - 1]

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def stop(self) -> list[tuple[float, float]]:
        """Ends the coordinator; returns the heartbeats that it took."""
        self._process.send_signal(signal.SIGINT)
        beats: list[tuple[float, float]] = (await self.said("beats"))["beats"]
        return beats

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in self._output:
            loop.call_soon_threadsafe(self._heard, json.loads(line))

    def _heard(self, event: dict[str, Any]) -> None:
        self._said.append(event)
        self._news.set()


async def heartbeat_rows(nodes: int) -> list[Row]:
    """All nodes are in a plan whose first step never ends, so that they send nothing but heartbeats."""
    with tempfile.TemporaryDirectory() as name:
        async with (
            Coordinator(Path(name), nodes, "1") as coordinator,
            Crowd(coordinator.invitation, MICRO_BATCH, None) as crowd,
        ):
            await crowd.join([f"node-{number:04d}" for number in range(nodes)], nodes / JOINS_PER_SECOND)
            await coordinator.said("plan_started")
            await asyncio.sleep(PART_SECONDS)
            began, used = time.monotonic(), coordinator.cpu_seconds()
            await asyncio.sleep(BEATING_SECONDS)
            until, busy = time.monotonic(), coordinator.cpu_seconds() - used
            if left := coordinator.count("node_left"):
                raise RuntimeError(f"{left} nodes were lost")
            beats = await coordinator.stop()
    taken = [(when, seconds) for when, seconds in beats if began < when < until]
    parts = [[s for when, s in taken if int((when - began) / PART_SECONDS) == part] for part in range(PARTS)]
    everything = [seconds for _, seconds in taken]
    what = f"heartbeat of {nodes} nodes, {len(taken) / BEATING_SECONDS:.0f}/s"
    return [
        Row(f"{what}: median", statistics.median(everything) * 1e3, "ms"),
        Row(f"{what}: 99th percentile", percentile(everything, 0.99) * 1e3, "ms"),
        Row(f"{what}: 99th percentile, median of {PARTS} parts", _median_of(parts) * 1e3, "ms"),
        Row(f"{what}: longest", max(everything) * 1e3, "ms"),
        Row(f"coordinator with {nodes} nodes", busy / BEATING_SECONDS, "cores"),
    ]


async def storm_rows(nodes: int) -> list[Row]:
    """``nodes`` join within a second while FEW train."""
    with tempfile.TemporaryDirectory() as name:
        async with (
            Coordinator(Path(name), FEW, "2") as coordinator,
            Crowd(coordinator.invitation, MICRO_BATCH, STEP_SECONDS) as crowd,
        ):
            await crowd.join([f"early-{number}" for number in range(FEW)], 0.1)
            await coordinator.said("step_committed", 5)
            before = {event: coordinator.count(event) for event in ("plan_wanted", "planned", "plan_adopted")}
            began = time.monotonic()
            await crowd.join([f"node-{number:04d}" for number in range(nodes)], 1.0)
            here = (await coordinator.said("node_joined", FEW + nodes))["at"]
            ready = (await coordinator.said("node_ready", FEW + nodes))["at"]
            planned = (await coordinator.said("planned", before["planned"] + 1))["at"]
            await asyncio.sleep(SETTLING_SECONDS)
            after = {event: coordinator.count(event) - count for event, count in before.items()}
    return [
        Row(f"storm of {nodes} joins: plans asked for", after["plan_wanted"], ""),
        Row(f"storm of {nodes} joins: plans adopted", after["plan_adopted"], "plans"),
        Row(f"storm of {nodes} joins: first hello to last welcome", here - began, "s"),
        Row(f"storm of {nodes} joins: last welcome to all ready", ready - here, "s"),
        Row(f"storm of {nodes} joins: all ready to plan made", planned - ready, "s"),
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of ``values`` that the part ``share`` of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _median_of(parts: Sequence[Sequence[float]]) -> float:
    return statistics.median(percentile(part, 0.99) for part in parts if part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000, help="nodes that send heartbeats")
    parser.add_argument("--storm", type=int, default=200, help="nodes that join within a second")
    parser.add_argument("--only", choices=("restart", "heartbeats", "storm"), help="leave out the others")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    parts: dict[str, Callable[[], list[Row]]] = {
        "restart": lambda: list(restart_rows()),
        "heartbeats": lambda: asyncio.run(heartbeat_rows(arguments.nodes)),
        "storm": lambda: asyncio.run(storm_rows(arguments.storm)),
    }
    for name, rows in parts.items():
        if arguments.only in (name, None):
            show(f"The coordinator on one core: {name}", rows(), arguments.json)


if __name__ == "__main__":
    main()

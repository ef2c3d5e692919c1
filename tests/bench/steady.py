"""How often plans change for noise alone: ``python -m tests.bench.steady [--minutes 30] [--quiet] [--json]``.

Four nodes with equal devices on this machine, and beside them other work that comes and goes: one to three busy processes, for
times as heavy-tailed as the seed draws them. Each change of plan costs a pause, and no device has changed. To compare with an
earlier version, run it in that version's folder.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from tests.bench.rows import Row, show
from tests.cluster.launch import Cluster
from tests.cluster.nursery import close_nursery
from tests.cluster.runs import run_file

NODES = ("a", "b", "c", "d")
MODEL = """
[model]
family = "llama"
config = { hidden_size = 64, num_hidden_layers = 4, num_attention_heads = 4, intermediate_size = 256 }
"""
FIRST_STEPS = 20
"""Steps that are not counted: the first plan rests on timings that nodes made at the same time."""
BURN = "while True: pass"


def disturb(stop: threading.Event, seed: int) -> None:
    """Keeps cores busy by fits and starts until ``stop``."""
    chance = random.Random(seed)
    while not stop.wait(chance.expovariate(1 / 10)):
        burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(chance.randint(1, 3))]
        stop.wait(min(chance.paretovariate(1.1), 60.0))
        for process in burning:
            process.kill()
            process.wait()


def measure(folder: Path, minutes: float, *, seed: int | None, lease: float) -> list[Row]:
    """``seed``: of the other work; None: no other work runs."""
    text = run_file(model=MODEL, stages=[4], steps=1_000_000, precision="fp32", learning_rate=1e-3, lease=lease)
    text = text.replace("stages = [4]", 'stages = "auto"').replace("sequence_length = 32", "sequence_length = 64")
    text = text.replace("global_batch = 20", "global_batch = 64")
    stop = threading.Event()
    with Cluster(folder, text) as cluster:
        for node in NODES:
            cluster.add(node)
        began = cluster.wait_for("step_committed", where=lambda e: e["step"] >= FIRST_STEPS, timeout=600)
        other = threading.Thread(target=disturb, args=(stop, seed)) if seed is not None else None
        if other is not None:
            other.start()
        try:
            time.sleep(60 * minutes)
        finally:
            stop.set()
            if other is not None:
                other.join()
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        cluster.finish()
    events = [event for event in cluster.log() if event["time"] >= began["time"]]
    hours = (events[-1]["time"] - began["time"]) / 3600
    count = Counter(event["event"] for event in events)
    seconds = [event["seconds"] for event in events if event["event"] == "step_committed"]
    idle = {n for event in events if event["event"] == "plan_adopted" for n in event["plan"].get("idle", ())}
    return [
        Row("plan changes", count["plan_adopted"] / hours, "an hour"),
        Row("repricings", count["plan_repriced"] / hours, "an hour"),
        Row("devices corrected", count["device_drifted"] / hours, "an hour"),
        Row("steps", count["step_committed"] / hours, "an hour"),
        Row("a step, median", statistics.median(seconds), "s"),
        Row("a step, mean", statistics.fmean(seconds), "s"),
        Row("nodes that were idle at some time", float(len(idle)), ""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lease", type=float, default=10.0, help="a short one shows more in less time")
    parser.add_argument("--quiet", action="store_true", help="no other work")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    seed, began = None if arguments.quiet else arguments.seed, time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(Path(folder), arguments.minutes, seed=seed, lease=arguments.lease)
    finally:
        close_nursery()
    beside = "alone" if arguments.quiet else "beside other work"
    title = f"Four nodes {beside}, {(time.monotonic() - began) / 60:.0f} minutes, {os.cpu_count()} cores"
    show(title, rows, arguments.json)


if __name__ == "__main__":
    main()

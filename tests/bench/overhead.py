"""The cost of being distributed, on one machine: ``python -m tests.bench.overhead [--json] [--steps N]``.

The demo (a coordinator and four nodes, 2 stages x 2 replicas) is compared with a plain PyTorch loop that trains the same model on
the same samples with all cores. The plain loop runs before and after the demo, to show whether the machine's speed drifts.
tokens/s are those of the median step; the first steps warm up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from dtfm.node.data.dataset import load_data
from dtfm.node.host.rows import Row, show
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.run_file.run_file import parse_run
from tests.cluster.plain import batch, whole_model

WARM_UP = 3


def plain_step_seconds(run: Run, steps: int) -> list[float]:
    """The seconds of each step of a plain loop on all cores."""
    torch.set_num_threads(os.cpu_count() or 1)
    data = load_data(run)
    model = whole_model(run, data, ())
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.train.learning_rate)
    train = run.train
    count = train.global_batch // train.micro_batch
    seconds = []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        for number in range(count):
            inputs, labels = batch(run, data, step, number)
            logits = model(inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / count
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return seconds[WARM_UP:]


def demo_step_seconds(steps: int) -> list[float]:
    """The seconds from commit to commit of the demo."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run.toml").touch()
        command = [
            sys.executable,
            "-m",
            "dtfm.coordinator.cli",
            "demo",
            "--run",
            f"{folder}/run.toml",
            "--steps",
            str(steps),
            "--dir",
            folder,
            "--json",
        ]
        output = subprocess.run(command, check=True, capture_output=True, timeout=900).stdout
    events = [json.loads(line) for line in output.splitlines()]
    return [e["seconds"] for e in events if e["event"] == "step_committed"][WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="steps of the demo; the plain loop runs half of them before and half after",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    run = parse_run({}, "the demo's run").message("bench")
    tokens = run.train.global_batch * run.data.sequence_length
    half = arguments.steps // 2 + WARM_UP
    before = plain_step_seconds(run, half)
    demo = tokens / statistics.median(demo_step_seconds(arguments.steps + WARM_UP))
    after = plain_step_seconds(run, half)
    plain = tokens / statistics.median(before + after)
    drift = statistics.median(after) / statistics.median(before)
    rows = [
        Row("plain loop, all cores", plain, "tokens/s"),
        Row("demo, 4 nodes", demo, "tokens/s", "plain loop, all cores", demo / plain),
        Row("plain loop's step after the demo", statistics.median(after), "s", "before the demo", drift),
    ]
    show(f"Overhead on {os.cpu_count()} cores, {tokens} tokens per step", rows, arguments.json)


if __name__ == "__main__":
    main()

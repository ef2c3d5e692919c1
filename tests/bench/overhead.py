"""The cost of being distributed, on one machine: ``python -m tests.bench.overhead [--json] [--steps N] [--run RUN.toml]
[--nodes N] [--device cuda]``.

The demo (a coordinator and four nodes, 2 stages x 2 replicas) is compared with a plain PyTorch loop. The loop trains the same
model on the same samples with all cores, or on the device that the nodes share. It runs before and after the demo, to show
whether the machine's speed drifts. tokens/s are of the median step; the first steps warm up. On a GPU, rows of "utilisation"
compare the FLOP/s with the FLOP/s of products of large matrices.
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
from collections.abc import Sequence
from pathlib import Path

import torch

from dtfm.node.data.load import load_data
from dtfm.node.host.cuda_streams import wait_until_computed
from dtfm.node.host.device import measure_flops
from dtfm.node.model.load import load_model
from dtfm.node.model.precision import compute_dtype
from dtfm.protos.plan_pb2 import BF16, Run
from dtfm.protos.run_file.run_file import parse_run, read_run_file
from tests.bench.rows import Row, show
from tests.cluster.plain import batch, whole_model

WARM_UP = 3
CPU = torch.device("cpu")
PLAIN = "plain loop, all cores"


def plain_step_seconds(run: Run, steps: int, device: torch.device = CPU) -> list[float]:
    """The seconds of each step of a plain loop, on all cores if ``device`` is the CPU."""
    torch.set_num_threads(os.cpu_count() or 1)
    data = load_data(run)
    model = whole_model(run, data, ()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.train.learning_rate)
    train = run.train
    count = train.global_batch // train.micro_batch
    seconds = []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        for number in range(count):
            inputs, labels = (tensor.to(device) for tensor in batch(run, data, (step - 1) * count + number))
            with torch.autocast(device.type, torch.bfloat16, enabled=train.precision == BF16):
                logits = model(inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / count
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        wait_until_computed(device)
        seconds.append(time.perf_counter() - began)
    return seconds[WARM_UP:]


def demo_step_seconds(
    steps: int, nodes: int = 4, device: torch.device = CPU, run_file: Path | None = None
) -> list[float]:
    """The seconds from commit to commit of the demo."""
    with tempfile.TemporaryDirectory() as folder:
        if run_file is None:
            (run_file := Path(folder) / "run.toml").touch()
        command = [
            sys.executable,
            "-m",
            "dtfm.coordinator.cli",
            "demo",
            "--run",
            str(run_file),
            "--steps",
            str(steps),
            "--nodes",
            str(nodes),
            "--device",
            str(device),
            "--dir",
            folder,
            "--no-page",
            "--json",
        ]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=900).stdout
    events = [json.loads(line) for line in output.splitlines()]
    return [e["seconds"] for e in events if e["event"] == "step_committed"][WARM_UP:]


def measure(steps: int, nodes: Sequence[int], device: torch.device = CPU, run_file: Path | None = None) -> list[Row]:
    """The plain loop, the demo with each of these numbers of nodes, and the plain loop again."""
    run = (read_run_file(run_file) if run_file else parse_run({}, "the demo's run")).message("bench")
    tokens = run.train.global_batch * run.data.sequence_length
    half = steps // 2 + WARM_UP
    before = plain_step_seconds(run, half, device)
    demos = {n: tokens / statistics.median(demo_step_seconds(steps + WARM_UP, n, device, run_file)) for n in nodes}
    after = plain_step_seconds(run, half, device)
    plain = tokens / statistics.median(before + after)
    drift = statistics.median(after) / statistics.median(before)
    rows = [Row(PLAIN, plain, "tokens/s")]
    rows += [
        Row(f"demo, {n} nodes" if n > 1 else "demo, one node", v, "tokens/s", PLAIN, v / plain)
        for n, v in demos.items()
    ]
    if device.type == "cuda":
        model = load_model(run.model, load_data(run).sample)
        flops = 3 * sum(layer.flops for layer in model.layers) / run.data.sequence_length
        peak = measure_flops(device, compute_dtype(run), seconds=1.0)
        rows += [
            Row(
                f"utilisation, {row.measure}",
                row.value * flops / 1e12,
                "TFLOP/s",
                "matrix products",
                row.value * flops / peak,
            )
            for row in rows
        ]
    return [*rows, Row("plain loop's step after the demo", statistics.median(after), "s", "before the demo", drift)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="steps of the demo; the plain loop runs half of them before and half after",
    )
    parser.add_argument("--run", type=Path, help="the run file; default: the demo's own model")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4], help="nodes of each demo")
    parser.add_argument("--device", type=torch.device, default=CPU, help="cpu, cuda or cuda:N")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    rows = measure(arguments.steps, arguments.nodes, arguments.device, arguments.run)
    show(f"Overhead on {os.cpu_count()} cores", rows, arguments.json)


if __name__ == "__main__":
    main()

"""How long the weights take to the coordinator's disk over home lines, and how much training loses in that time.

    python -m tests.bench.weights_home [--megabits 20] [--steps 120]

A coordinator and two nodes, each in a network namespace of its own (root). ``--megabits`` limits the Mbit/s that a node sends.
A checkpoint is due every third of the steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from tests.bench.rows import Row, show
from tests.cluster.launch import Cluster
from tests.cluster.runs import run_file
from tests.wan.internet import Internet

MODEL = """
[model]
family = "llama"
config = { hidden_size = 256, num_hidden_layers = 6, num_attention_heads = 4, intermediate_size = 1024 }
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=float, default=20.0, help="what a node may send, in Mbit/s")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options.megabits, options.steps)
    show("Weights come home", rows, options.json)


def measure(folder: Path, megabits: float, steps: int) -> list[Row]:
    every = steps // 3
    text = run_file(
        model=MODEL, stages=[1, 1], steps=steps, checkpoint_every=every, precision="fp32", storage="coordinator:"
    )
    with Internet() as net:
        address = net.host("coordinator")
        for name in "ab":
            net.host(name)
            net.limit(name, megabits)
        with Cluster(folder, text, address=f"{address}:7400", place=net.inside, invited=True) as cluster:
            for name in "ab":
                cluster.add(name)
            assert cluster.finish(600) == 0
        commits = {event["step"]: event["time"] for event in cluster.of("step_committed")}
        written = {event["step"]: event["time"] for event in cluster.of("checkpoint_written")}
        size = sum(file.stat().st_size for file in (folder / f"dtfm-runs/test/step-{steps:08d}").glob("bucket-*"))
    uploads = [(commits[step], end) for step, end in written.items() if step < steps]
    beside, alone = list[float](), list[float]()
    for step in range(every // 2, steps):
        begin, end = commits[step], commits[step + 1]
        is_beside = any(begin < until and end > since for since, until in uploads)
        (beside if is_beside else alone).append(end - begin)
    least = size / 2 / (megabits * 1e6 / 8)
    lines = f"{size / 1e6:.1f} MB over both lines, each {megabits:g} Mbit/s: {least:.3g} s"
    after, meanwhile = written[steps] - commits[steps], statistics.median(end - begin for begin, end in uploads)
    slowed, free = statistics.median(beside), statistics.median(alone)
    return [
        Row("weights come home after the last step", after, "s", lines, after / least),
        Row("weights come home while the run trains", meanwhile, "s", lines, meanwhile / least),
        Row(
            "a step beside an upload",
            slowed,
            "s",
            f"one without: {free:.3g} s ({len(beside)}, {len(alone)} steps)",
            slowed / free,
        ),
    ]


if __name__ == "__main__":
    main()

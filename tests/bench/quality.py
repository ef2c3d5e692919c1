"""The effect of compression on learning: ``python -m tests.bench.quality [--json] [--steps N] [--seeds N] [--whole]``.

The demo's model is trained once per codec and direction, with all other tensors uncompressed. It is also trained once under
"auto", where links have 100 Mbit/s and devices 50 TFLOP/s; with such fast devices "auto" compresses as much as it can. Each
value is the held-out loss after the last step, in nats per token. The ratio is to the loss of the uncompressed run with the
same seed. With several seeds both are means, and the ratio's standard error has a separate row. One node alone trains the same
except for the order of sums. So its difference is due to chance, and differences of the same size in other rows may be, too.

Four nodes, two stages of two replicas, are threads of one process here (tests/node/in_process.py). They use the same code for
generations, codecs and frames as processes, hence the same arithmetic, but no sockets. A step has 8 sequences of 128 tokens
instead of the demo's 32 of 256. With ``--whole`` it has the demo's, which takes ten times longer.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from dtfm.node.data.load import load_data
from dtfm.node.model.load import load_model
from dtfm.protos.run_file.run_file import parse_run
from tests.bench.rows import Row, show
from tests.node.in_process import InProcess, even_plan

TENSORS, CODECS = ("activations", "gradients", "reduction"), ("raw16", "i8b256", "i4b64")
BANDWIDTH = 100e6 / 8
FLOPS = 50e12
SMALLER = {"train": {"global_batch": 8, "micro_batch": 2}, "data": {"sequence_length": 128}}


@dataclass(frozen=True, slots=True)
class Way:
    """``network``: the table of the run file. ``shape``: stages x replicas."""

    name: str
    network: Mapping[str, str]
    shape: tuple[int, int] = (2, 2)


WAYS = (
    Way("off", {"compression": "off"}),
    Way("off, one node", {"compression": "off"}, (1, 1)),
    Way("auto at 100 Mbit/s", {"compression": "auto"}),
    *(Way(f"{tensors} {codec}", {"compression": "off", tensors: codec}) for tensors in TENSORS for codec in CODECS),
)


@dataclass(frozen=True, slots=True)
class Trained:
    """``codecs``: the nodes' report about their streams. ``megabytes``: sent by all nodes in all steps."""

    loss: float
    seconds: float
    megabytes: float
    codecs: str


def train(way: Way, seed: int, steps: int, whole: bool) -> Trained:
    torch.set_num_threads(1)
    began = time.perf_counter()
    given = {} if whole else SMALLER
    table = {"seed": seed, **given, "train": {**given.get("train", {}), "steps": steps}, "network": dict(way.network)}
    run = parse_run(table, way.name).message("quality")
    data = load_data(run)
    model = load_model(run.model, data.sample)
    stages, replicas = way.shape
    plan = even_plan(len(model.layers), stages, replicas, run.train.global_batch // run.train.micro_batch)
    with InProcess(run, plan, model, data, bandwidth=BANDWIDTH, flops=FLOPS) as nodes:
        for _ in range(steps):
            nodes.train()
        for stage in plan.stages:
            replicas_of = [nodes.generations[name].stage.buckets.values() for name in stage.replicas]
            digests = {tuple(bucket.digests()[0] for bucket in buckets) for buckets in replicas_of}
            assert len(digests) == 1, f"the replicas {stage.replicas} differ"
        sent = sum(sender.sent_bytes for sender in nodes.senders.values())
        codecs = "; ".join(sorted({str(g.codecs) for g in nodes.generations.values()}))
        return Trained(nodes.evaluate(), time.perf_counter() - began, sent / 1e6, codecs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1, help="the number of runs of each kind, with seeds 1, 2, ...")
    parser.add_argument("--whole", action="store_true", help="steps with the demo's number and length of sequences")
    parser.add_argument(
        "--only", nargs="+", choices=[way.name for way in WAYS], help="the others are compared with the first"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at the same time")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        ways = [way for way in WAYS if arguments.only is None or way.name in arguments.only]
        seeds = range(1, arguments.seeds + 1)
        running = [[pool.submit(train, way, seed, arguments.steps, arguments.whole) for seed in seeds] for way in ways]
        rows: list[Row] = []
        first: list[float] = []
        for way, futures in zip(ways, running, strict=True):
            losses: list[float] = []
            for seed, future in zip(seeds, futures, strict=True):
                trained = future.result()
                print(f"{way.name}, seed {seed}: {trained}", file=sys.stderr, flush=True)
                losses.append(trained.loss)
            first = first or losses
            ratios = [loss / other for loss, other in zip(losses, first, strict=True)]
            compared = (ways[0].name, statistics.mean(ratios)) if rows else ()
            rows.append(Row(way.name, statistics.mean(losses), "nats/token", *compared))
            if compared and len(ratios) > 1:
                error = statistics.stdev(ratios) / math.sqrt(len(ratios))
                rows.append(Row(f"{way.name}: standard error of the ratio", error, ""))
    size = "of the demo's size" if arguments.whole else "of 8 x 128 tokens"
    show(f"Held-out loss after {arguments.steps} steps {size}, seeds 1 to {arguments.seeds}", rows, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

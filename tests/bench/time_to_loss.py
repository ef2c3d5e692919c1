"""How soon several homes have a loss, each way: ``python -m tests.bench.time_to_loss [--nodes 4] [--mbit 1] [--rounds 10 30]
[--steps 210] [--seeds 3] [--json]``.

A value is the time until a model has the held-out loss that one node alone has after --steps steps: the seconds that a step's
samples take, times the number of steps that it takes. The seconds are measured over an emulated network of home lines with slow
devices (islands_run.py), the steps without a network (islands.py), in the mean over seeds. The learning rate is constant.

Beside ours are two ways of torch's, in which each node holds the whole model. Their seconds are the computing of one node alone,
divided by the nodes, and a measured all-reduce over Gloo in float32: after each step, as DistributedDataParallel has it, but not
overlapped; or once in a round, as in torchft's DiLoCo, with its outer rate of 0.7 and momentum of 0.9.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from dtfm.node.data.dataset import load_data
from dtfm.node.host.rows import Row, show
from dtfm.protos.run_file.run_file import read_run_file
from dtfm.scheduler.model.rounds import Rounds
from tests.bench import reduce
from tests.bench.islands import Way, held_out, steps_to
from tests.bench.islands_run import MICRO_BATCHES, homes, measure
from tests.bench.reduce_end import BUCKETS
from tests.cluster.plain import CPU, whole_model
from tests.cluster.runs import write_corpus
from tests.wan.unequal import LEASE_SHARED, run_file
from tests.wan.wan import Wan, WanUnavailable

AS_MANY_STEPS = 2
"""Each way gets at most this many times the steps of one node alone."""


@dataclass(frozen=True, slots=True)
class Timed:
    """``seconds`` that a step's samples take, this way."""

    name: str
    way: Way
    seconds: float


def timed(nodes: int, mbit: float, lengths: Sequence[int], elements: int) -> list[Timed]:
    """One node alone first. ``elements``: of the model."""
    found = []
    for count, length in ((1, 0), (nodes, 0), *((nodes, length) for length in lengths)):
        with tempfile.TemporaryDirectory() as folder:
            one = measure(homes(count, mbit), Rounds(length), Path(folder))
        name = "one node alone" if count == 1 else f"{nodes} nodes, rounds = {length}"
        way = Way(one.islands, length, "i4b64") if one.islands > 1 else Way()
        found.append(Timed(f"{name}, {one.islands} islands" if one.islands > 1 else name, way, one.seconds))
    os.environ["REDUCE_ELEMENTS"] = str(-(-elements // BUCKETS))
    with Wan(homes(nodes, mbit)) as wan:
        exchange, _ = reduce.measure(wan, sys.executable, "gloo", 1, "")
    computing = found[0].seconds / nodes
    found.append(Timed("DistributedDataParallel", Way(), computing + exchange))
    for length in lengths:
        way = Way(nodes, length, "off", 0.7, 0.9)
        found.append(Timed(f"DiLoCo every {length} steps", way, computing + exchange / length))
    return found


def rows_of(ways: Sequence[Timed], losses: Mapping[Way, Sequence[Mapping[int, float]]], steps: int) -> list[Row]:
    target = [of_seed[steps] for of_seed in losses[Way()]]
    rows = list[Row]()
    alone = ways[0].seconds * steps
    for each in ways:
        rows.append(Row(f"{each.name}: a step's samples", each.seconds, "s"))
        pairs = list(zip(losses[each.way], target, strict=True))
        if all(min(of_seed.values()) <= loss for of_seed, loss in pairs):
            needed = statistics.mean(steps_to(loss, of_seed) for of_seed, loss in pairs)
            rows.append(Row(f"{each.name}: steps to the loss", needed, "steps", "alone", needed / steps))
            seconds = needed * each.seconds
            rows.append(Row(f"{each.name}: time to the loss", seconds, "s", "alone", seconds / alone))
        else:
            rows.append(Row(f"{each.name}: steps to the loss, more than", AS_MANY_STEPS * steps, "steps"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=1.0, help="Mbit/s of each home's line, up and down")
    parser.add_argument("--rounds", type=int, nargs="+", default=[10, 30], help="steps between two exchanges")
    parser.add_argument("--steps", type=int, default=210, help="of one node alone; a multiple of each of --rounds")
    parser.add_argument("--seeds", type=int, default=3, help="the number of runs of each way, for the loss")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    options = parser.parse_args()
    if wrong := [length for length in options.rounds if options.steps % length]:
        parser.error(f"--steps {options.steps} is not a multiple of --rounds {wrong[0]}")
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder))
        text = run_file(MICRO_BATCHES, LEASE_SHARED).replace("corpus.txt", f"{folder}/corpus.txt")
        path = Path(folder, "run.toml")
        text = text.replace("evaluation_samples = 1\n", 'evaluation_samples = 32\nschedule = "constant"\n')
        path.write_text(text)
        run = read_run_file(path).message("bench")
        elements = sum(parameter.numel() for parameter in whole_model(run, load_data(run), ()).parameters())
        try:
            ways = timed(options.nodes, options.mbit, options.rounds, elements)
        except WanUnavailable as reason:
            print(f"No network can be emulated here: {reason}", file=sys.stderr)
            return 2
        seeds, steps = range(1, options.seeds + 1), AS_MANY_STEPS * options.steps
        with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
            running = {
                way: [pool.submit(held_out, way, path, seed, 0, steps, CPU) for seed in seeds]
                for way in dict.fromkeys(each.way for each in ways)
            }
            losses = {way: [done.result() for done in found] for way, found in running.items()}
    title = f"{options.nodes} homes with {options.mbit:g} Mbit/s, to the loss of one node after {options.steps} steps"
    show(title, rows_of(ways, losses, options.steps), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What it costs in tokens to exchange seldom: ``python -m tests.bench.islands [--json] [--run RUN.toml] [--device cuda]
[--after N] [--steps N] [--seeds N] [--islands 2 4 8] [--every 10 30] [--outer off:0.7:0.9 i4b64:1:0 i4b64:auto] [--batch-each]
[--batch-grows] [--optimizer adamw muon] [--kept FILE]``.

The model is trained once with an exchange after every step, like a run without rounds. Then it is trained once for each number
of islands, interval and outer rule (the codec of exchanges, outer rate, outer momentum; "auto": each exchange tries some on
held-out samples), and all that with each optimizer. All is compared with the first run. The rule is the product's, written
again in tests/cluster/plain.py. Each value is the held-out loss after the same number of tokens, in nats per token; "steps
lost" is how many steps earlier the first run had that loss. All islands are in one process, and nothing is sent: this says
nothing about seconds. Multiply with the tokens per second that `plan` prints.

``--after`` says how many steps one island trains first. The benchmark prints after which step a run would let islands begin.

With ``--batch-each`` an island does not share the samples of a step, but has as many as the first run: as if each GPU that
joins brought its own. A step of N islands then takes as long as a step of the first run, and trains N times as many tokens. The
benchmark prints after how many steps it had the first run's last loss.

With ``--batch-grows`` a step of N islands also has N times the samples, but the run has as many tokens as the first one, as
with `[train] batch_grows`: after ``--after`` it takes an N-th of the steps, at a rate that is the root of N times as high.
Exchanges come every ``--every`` of these steps, and the schedule goes by samples. Rows count steps of the first run.

With ``--kept`` each run's losses go into a file when it ends. The same command again begins with these, and trains the rest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from dtfm.coordinator.core.plan.steep_start import fall_of
from dtfm.coordinator.core.step.outer_steps import NO_MOMENTUM, OUTER_STEPS
from dtfm.coordinator.log.outer import Looked
from dtfm.coordinator.log.recent_losses import WINDOW
from dtfm.node.data.load import load_data
from dtfm.protos.outer import OuterStep
from dtfm.protos.plan_pb2 import ADAMW, MUON, Run
from dtfm.protos.run_file.run_file import parse_run, read_run_file
from dtfm.scheduler.model.chains import LOOKED
from dtfm.scheduler.model.rounds import Rounds
from tests.bench.rows import Row, show
from tests.cluster.plain import CPU, Outer, held_out_loss_of, losses_of_islands, scheduled_rate

SMALL = {"train": {"global_batch": 32, "micro_batch": 4}, "data": {"sequence_length": 128}}
"""The demo's model and text, if no run file is given."""


@dataclass(frozen=True, slots=True)
class Way:
    """``batch``: the samples per step of this way, as a multiple of the run file's global_batch."""

    islands: int = 1
    every: int = 1
    codec: str = "off"
    rate: float = 1.0
    """0: each exchange chooses rate and momentum."""
    momentum: float = 0.0
    batch: int = 1
    optimizer: str = "adamw"
    grows: bool = False
    """Whether a step of several islands has as many batches of the run file, and the run fewer steps."""

    def __str__(self) -> str:
        muon = ", muon" if self.optimizer == "muon" else ""
        if self.every == 1:
            return f"every step{muon}"
        samples = f", {self.batch} times the samples" if self.batch > 1 else ", the batch grows" * self.grows
        outer = f"{self.codec}, rate {self.rate:g}, momentum {self.momentum:g}" if self.rate else f"{self.codec}, auto"
        return f"{self.islands} islands, every {self.every}, {outer}{samples}{muon}"

    def rounds(self, after: int) -> Callable[[int], Rounds]:
        """The rounds in force in a step. One island trains the first ``after`` batches."""
        first, split = Rounds(0, self.every + 1, 1), after // self.every * (self.every + 1)
        if not self.grows:
            return lambda _: first
        grown = Rounds(split, self.every + 1, 1, before=after // self.every, batches_each=self.islands)
        return lambda step: grown if step > split else first


def held_out(
    way: Way, run_file: Path | None, seed: int, after: int, steps: int, device: torch.device
) -> dict[int, float]:
    """By the number of batches trained, the held-out loss after each exchange. The first ``after`` steps have one island."""
    run = (read_run_file(run_file) if run_file else parse_run(SMALL, "bench")).message("islands")
    adapt(run, way, seed, after + steps)
    count, split = run.train.global_batch // run.train.micro_batch, after // way.every * (way.every + 1)
    rounds, last = way.rounds(after), run.train.steps
    if way.grows:
        last = split + (last - split) // way.islands

    def shares(step: int) -> dict[int, range]:
        islands, now = way.islands if step > split else 1, rounds(step)
        first = now.batches(step - 1) * count
        of_step = range(first, first + count * now.batches_each)
        return {island: of_step[island::islands] for island in range(islands)}

    def done(step: int) -> int:
        """The steps, exchanges among them, in which a run whose batch does not grow trains as much."""
        return rounds(step).batches(step) * (way.every + 1) // way.every if way.grows else step

    def exchanges(step: int) -> bool:
        return rounds(step).exchanges(step)

    def rate(run: Run, step: int) -> float:
        return scheduled_rate(run, done(step)) * math.sqrt(rounds(step).batches_each)

    found: dict[int, float] = {}
    chooses = None if way.rate else by_trying(run, way, device, done)
    losses = losses_of_islands(run, shares, exchanges, found, device=device, outer=chooses, rate=rate)
    told = [*itertools.islice(losses, last)]
    if way.every == 1 and way.optimizer == "adamw":
        left = steep_until(told[::2], run.train.warmup_steps // 2)
        print(f"seed {seed}: the loss leaves its steep start after step {left}", file=sys.stderr, flush=True)
    return {rounds(step).batches(step): loss for step, loss in found.items()}


@dataclass(frozen=True, slots=True)
class Kept:
    """The losses of runs that have ended, in a file with a line for each; without a file, nothing is kept."""

    file: Path | None

    def find(self, *which: object) -> dict[int, float] | None:
        """The losses of this run, if it has ended."""
        if self.file is None or not self.file.exists():
            return None
        lines = map(json.loads, self.file.read_text().splitlines())
        found = next((losses for run, losses in lines if run == [*map(str, which)]), None)
        return None if found is None else {int(step): loss for step, loss in found.items()}

    def add(self, losses: Mapping[int, float], *which: object) -> None:
        if self.file is not None:
            with self.file.open("a") as lines:
                lines.write(json.dumps([[*map(str, which)], losses]) + "\n")


def held_out_or_kept(
    kept: Kept, way: Way, run_file: Path | None, seed: int, after: int, steps: int, device: torch.device
) -> dict[int, float]:
    """See held_out."""
    which = way, run_file, seed, after, steps
    if (losses := kept.find(*which)) is None:
        kept.add(losses := held_out(*which, device), *which)
    return losses


def steep_until(losses: Sequence[float], warmup: int) -> int | None:
    """The step from which on a run with these losses, one a step, may have islands. None: there is none."""
    for step in range(len(losses)):
        if not fall_of(losses[max(warmup, step - WINDOW) : step]).is_steep:
            return step
    return None


def by_trying(run: Run, way: Way, device: torch.device, done: Callable[[int], int]) -> Outer:
    """Chooses outer steps as the product does. Islands have held-out micro-batches of their own, as many as it gives them. They
    are among those that judge the result."""
    data, last = load_data(run), NO_MOMENTUM
    number = min(LOOKED, run.train.global_batch // run.train.micro_batch // way.islands)

    def choose(step: int, under: Callable[[OuterStep], Any]) -> OuterStep:
        nonlocal last
        if done(step) <= run.train.warmup_steps:
            return NO_MOMENTUM
        tried = (last, *(each for each in OUTER_STEPS if each != last))
        told = dict[str, tuple[float, ...]]()
        models = [under(each) for each in tried]
        for island in range(way.islands):
            first = step + island * number
            batches = range(first, first + number)
            told[str(island)] = tuple(
                statistics.mean(held_out_loss_of(run, data, model, batch, device) for batch in batches)
                for model in models
            )
        last = Looked(tried, told, 0.0).best
        return last

    return choose


def adapt(run: Run, way: Way, seed: int, steps: int) -> None:
    """Makes ``run`` train ``steps`` steps in this way. Exchanges are steps, too, also of the warm-up."""
    rounds = (way.every + 1) / way.every
    train = run.train
    train.global_batch *= way.batch
    train.warmup_steps = min(round(train.warmup_steps * rounds), int(steps * rounds) // 4)
    train.steps, run.seed = round(steps * rounds), seed
    train.outer_rate, train.outer_momentum, run.network.exchange = way.rate, way.momentum, way.codec
    train.optimizer = MUON if way.optimizer == "muon" else ADAMW


def latest(losses: Mapping[int, float], step: int) -> int:
    """Of the steps with losses, the last one up to ``step``, or the first."""
    return max((each for each in losses if each <= step), default=min(losses))


def steps_to(loss: float, losses: Mapping[int, float]) -> float:
    """The number of steps after which a run with these ``losses``, by step, had this loss. The first step, if it had the loss
    from the beginning; the last, if it never had."""
    for (before, high), (after, low) in itertools.pairwise(losses.items()):
        if high >= loss >= low:
            return before + (after - before) * (high - loss) / (high - low or 1)
    return float(min(losses) if loss > max(losses.values()) else max(losses))


def outer(text: str) -> tuple[str, float, float]:
    codec, *numbers = text.split(":")
    if numbers == ["auto"]:
        return codec, 0.0, 0.0
    rate, momentum = numbers
    return codec, float(rate), float(momentum)


def rows_of(ways: Sequence[Way], found: Sequence[Sequence[Mapping[int, float]]], after: int, steps: int) -> list[Row]:
    rows: list[Row] = []
    whole = after + steps
    for way, of_way in zip(ways, found, strict=True):
        value = statistics.mean(each[whole] for each in of_way)
        pairs = list(zip(of_way, found[0], strict=True))
        ratio = statistics.mean(mine[whole] / first[whole] for mine, first in pairs)
        rows.append(Row(str(way), value, "nats/token", *((str(ways[0]), ratio) if rows else ())))
        if way.batch > 1:
            needed = statistics.mean(steps_to(first[whole], mine) for mine, first in pairs)
            rows.append(Row(f"{way}: steps to the first run's loss", needed, "steps", "all", needed / whole))
        elif way.every > 1:
            lost = whole - statistics.mean(steps_to(mine[whole], first) for mine, first in pairs)
            rows.append(Row(f"{way}: steps lost", lost, "steps", "all", lost / steps))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="the run file; its rounds and steps do not count")
    parser.add_argument("--device", type=torch.device, default=CPU, help="cpu, cuda or cuda:N")
    parser.add_argument("--after", type=int, default=0, help="steps that one island trains before there are several")
    parser.add_argument("--steps", type=int, default=300, help="steps after those")
    parser.add_argument("--seeds", type=int, default=1, help="the number of runs of each kind, with seeds 1, 2, ...")
    parser.add_argument("--islands", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--every", type=int, nargs="+", default=[10, 30], help="steps between two exchanges")
    outers = [("off", 0.7, 0.9), ("i4b64", 1.0, 0.0), ("topk", 1.0, 0.0)]
    parser.add_argument("--outer", type=outer, nargs="+", default=outers, help="CODEC:RATE:MOMENTUM, or CODEC:auto")
    parser.add_argument("--batch-each", action="store_true", help="each island has global_batch samples in a step")
    parser.add_argument(
        "--batch-grows", action="store_true", help="a step has a batch for each island, the run fewer steps"
    )
    parser.add_argument("--optimizer", nargs="+", choices=("adamw", "muon"), default=["adamw"], help="train.optimizer")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at the same time")
    parser.add_argument("--kept", type=Path, metavar="FILE", help="where ended runs are kept for the next time")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    after, steps, whole = arguments.after, arguments.steps, arguments.after + arguments.steps
    if any(every < 2 or after % every or steps % every for every in arguments.every):
        parser.error(f"--every {arguments.every}: give 2 or more, and divisors of --after {after} and --steps {steps}")
    if after and arguments.batch_each:
        parser.error("--batch-each: leave out --after, as one island would train the samples of all of them")
    if arguments.batch_grows and arguments.batch_each:
        parser.error("--batch-grows: leave out --batch-each, under which a run has more samples instead of fewer steps")
    whole_rounds = [every * islands for every in arguments.every for islands in arguments.islands]
    if arguments.batch_grows and any(steps % each for each in whole_rounds):
        parser.error(
            f"--batch-grows: give --steps that are a multiple of islands times steps between exchanges: {whole_rounds}"
        )
    kinds = itertools.product(arguments.islands, arguments.every, arguments.outer)
    ways = [Way(), *(Way(islands, every, *rule) for islands, every, rule in kinds)]
    ways = [replace(way, optimizer=each) for each in arguments.optimizer for way in ways]
    if arguments.batch_grows:
        ways = [replace(way, grows=way.islands > 1) for way in ways]
    if arguments.batch_each:
        ways = [replace(way, batch=way.islands) for way in ways]
    seeds, kept = range(1, arguments.seeds + 1), Kept(arguments.kept)
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        running = [
            [
                pool.submit(held_out_or_kept, kept, way, arguments.run, seed, after, steps, arguments.device)
                for seed in seeds
            ]
            for way in ways
        ]
        found = []
        for way, futures in zip(ways, running, strict=True):
            found.append([future.result() for future in futures])
            quarters = [
                [round(losses[latest(losses, whole * part // 4)], 4) for part in (1, 2, 3, 4)] for losses in found[-1]
            ]
            print(f"{way}, at each quarter: {quarters}", file=sys.stderr, flush=True)
    title = f"Held-out loss after {steps} steps" + (f", and {after} of one island before" if after else "")
    show(title, rows_of(ways, found, after, steps), arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

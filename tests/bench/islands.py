"""What it costs in tokens to exchange seldom: ``python -m tests.bench.islands [--json] [--steps N] [--seeds N] [--islands 2 4 8]
[--every 10 30] [--codecs off sparse]``.

The demo's model is trained once as it is today, and once for each number of islands, interval and codec: an island is a copy of
the model that trains its share of each step's samples by AdamW alone. Every H steps all send what they have changed, and go on
from one state: that is DiLoCo's outer step (Douillard et al., arXiv 2311.08105), with the outer rates that were published for
1, 2, 4 and 8 copies (arXiv 2503.09799) and an outer momentum of 0.9. "sparse" sends 64 of each 4,096 changes, in 2 bits and 12
of place, and adds 0.95 of what it leaves out to the next ones (SparseLoCo, arXiv 2508.15706), without outer momentum. Each
value is the held-out loss after the same number of tokens, in nats per token; the ratio is to today's, with the same seeds.
"steps lost": how many steps earlier today's run had that loss. All copies are in one process, and nothing is sent: it says
nothing about seconds.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dtfm.coordinator.core.step.learning_rate import learning_rate
from dtfm.node.data.dataset import load_data
from dtfm.node.data.samples import evaluation_samples
from dtfm.node.host.rows import Row, show
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.run_file.run_file import parse_run
from tests.cluster.plain import batch, mean_loss, whole_model

OUTER_RATES = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}
OUTER_MOMENTUM = 0.9
BLOCK, SENT, KEPT = 4096, 64, 0.95
SMALL = {"train": {"global_batch": 16, "micro_batch": 2}, "data": {"sequence_length": 128}}
LOOKS = 20
"""How often the held-out loss is taken."""


@dataclass(frozen=True, slots=True)
class Way:
    islands: int = 1
    every: int = 0
    codec: str = "off"

    def __str__(self) -> str:
        return f"{self.islands} islands, every {self.every}, {self.codec}" if self.every else "every step, as today"


@dataclass(slots=True)
class Island:
    """A copy of the model. ``left_out``: what its messages have not said yet."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    left_out: torch.Tensor | None = None

    def train(self, run: Run, step: int, inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for tokens, labels in inputs:
            torch.autograd.backward(mean_loss(self.module(tokens), labels) / len(inputs))
        nn.utils.clip_grad_norm_(self.module.parameters(), run.train.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(run.train, step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def message(self, delta: torch.Tensor, codec: str) -> torch.Tensor:
        """What the others get of ``delta``."""
        if codec == "off":
            return delta
        whole = delta if self.left_out is None else delta + KEPT * self.left_out
        sent = sparse(whole)
        self.left_out = whole - sent
        return sent


def sparse(values: torch.Tensor) -> torch.Tensor:
    """The largest SENT of each BLOCK, as one of four multiples of the largest: 1, 1/3, -1/3 and -1."""
    blocks = nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    places = blocks.abs().topk(SENT, dim=1).indices
    largest = blocks.gather(1, places)
    scale = largest.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    levels = ((largest / scale * 3 - 1) / 2).round().clamp(-2, 1) * 2 + 1
    return torch.zeros_like(blocks).scatter_(1, places, levels / 3 * scale).view(-1)[: len(values)]


@dataclass(slots=True)
class Outer:
    """The state that all islands share between rounds."""

    state: torch.Tensor
    way: Way
    momentum: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.momentum = torch.zeros_like(self.state)

    @torch.no_grad()
    def exchange(self, islands: Sequence[Island]) -> None:
        deltas = [
            island.message(self.state - parameters_to_vector(island.module.parameters()), self.way.codec)
            for island in islands
        ]
        delta = torch.stack(deltas).mean(0)
        if self.way.codec == "off":
            self.momentum = OUTER_MOMENTUM * self.momentum + delta
            self.state = self.state - OUTER_RATES[self.way.islands] * (delta + OUTER_MOMENTUM * self.momentum)
        else:
            self.state = self.state - delta
        for island in islands:
            vector_to_parameters(self.state.clone(), island.module.parameters())


def losses(way: Way, seed: int, steps: int) -> list[float]:
    """The held-out losses after each of LOOKS equal parts of the run."""
    torch.set_num_threads(1)
    run = parse_run({**SMALL, "seed": seed, "train": {**SMALL["train"], "steps": steps}}, str(way)).message("islands")
    data = load_data(run)
    first = whole_model(run, data, ())
    islands = []
    for _ in range(way.islands):
        module = copy.deepcopy(first)
        decays = [[p for p in module.parameters() if (p.ndim >= 2) is matrix] for matrix in (True, False)]
        groups = [{"params": group, "weight_decay": run.train.weight_decay * (not n)} for n, group in enumerate(decays)]
        betas = (run.train.beta1, run.train.beta2)
        islands.append(Island(module, torch.optim.AdamW(groups, betas=betas, eps=run.train.epsilon)))
    outer = Outer(parameters_to_vector(first.parameters()).detach(), way)
    count = run.train.global_batch // run.train.micro_batch
    samples = evaluation_samples(0, micro_batch=run.train.evaluation_samples, count=data.evaluation_count)
    tokens, labels = data.evaluation_batch(samples)
    found = []
    for step in range(1, steps + 1):
        inputs = [batch(run, data, step, number) for number in range(count)]
        for number, island in enumerate(islands):
            island.train(run, step, inputs[number :: way.islands])
        if way.every and (step % way.every == 0 or step == steps):
            outer.exchange(islands)
        if step % (steps // LOOKS) == 0:
            shown = copy.deepcopy(first)
            if way.every:  # between rounds, what the islands have together
                mean = torch.stack([parameters_to_vector(i.module.parameters()).detach() for i in islands]).mean(0)
                vector_to_parameters(mean, shown.parameters())
            with torch.no_grad():
                found.append(float(mean_loss((shown if way.every else islands[0].module)(tokens), labels)))
    return found


def steps_lost(today: Sequence[float], loss: float, steps: int) -> float:
    """How many steps before the end ``today`` had this loss."""
    each = steps / LOOKS
    for part, (before, after) in enumerate(itertools.pairwise(today), 1):
        if before >= loss >= after:
            return steps - each * (part + (before - loss) / (before - after or 1))
    return 0.0 if loss <= today[-1] else float(steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1, help="the number of runs of each kind, with seeds 1, 2, ...")
    parser.add_argument("--islands", type=int, nargs="+", default=[2, 4, 8], choices=[*OUTER_RATES])
    parser.add_argument("--every", type=int, nargs="+", default=[10, 30], help="H")
    parser.add_argument("--codecs", nargs="+", default=["off", "sparse"], choices=["off", "sparse"])
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at the same time")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    if arguments.steps % LOOKS:
        parser.error(f"--steps {arguments.steps}: give a multiple of {LOOKS}")
    ways = [Way(), *itertools.starmap(Way, itertools.product(arguments.islands, arguments.every, arguments.codecs))]
    seeds = range(1, arguments.seeds + 1)
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        running = [[pool.submit(losses, way, seed, arguments.steps) for seed in seeds] for way in ways]
        curves = []
        for way, futures in zip(ways, running, strict=True):
            curves.append([future.result() for future in futures])
            print(f"{way}: {[curve[-1] for curve in curves[-1]]}", file=sys.stderr, flush=True)
    rows: list[Row] = []
    for way, of_way in zip(ways, curves, strict=True):
        value = statistics.mean(curve[-1] for curve in of_way)
        ratio = statistics.mean(mine[-1] / today[-1] for mine, today in zip(of_way, curves[0], strict=True))
        rows.append(Row(str(way), value, "nats/token", *((str(ways[0]), ratio) if rows else ())))
        if way.every:
            lost = [steps_lost(t, m[-1], arguments.steps) for t, m in zip(curves[0], of_way, strict=True)]
            rows.append(
                Row(
                    f"{way}: steps lost", statistics.mean(lost), "steps", "all", statistics.mean(lost) / arguments.steps
                )
            )
    show(f"Held-out loss after {arguments.steps} steps of 16 x 128 tokens", rows, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How far honest gradient norms stay below the bound of what one party alone says (core/step/norms.py): ``python -m
tests.bench.norms [--steps 200] [--seeds 1] [--json]``.

Small models train in one process on Python's own source text. Some have learning rates that are too high, single samples for
batches, or a strange batch every 50 steps: one token alone, noise, one sample many times, every other token replaced. Each step
gives the norm of each layer's gradients. The layers are cut in each way into two, three or four stages, or one for each layer.
Each stage is bounded as if one party held it.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import math
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from dtfm.coordinator.core.state.measured import Norms
from dtfm.coordinator.core.step import norms
from dtfm.scheduler.model.plan import Stage
from tests.bench.rows import Row, show

LAYERS, WIDTH, VOCABULARY = 6, 64, 256
STRANGE_EVERY = 50


@dataclass(frozen=True, slots=True)
class Case:
    """``clip``: the largest norm; 0: nothing is clipped. ``strange``: some batches are."""

    family: str
    rate: float
    warmup: int = 20
    clip: float = 1.0
    samples: int = 8
    length: int = 64
    strange: bool = True


CASES = {
    "llama": Case("llama", 3e-3, strange=False),
    "llama, strange batches": Case("llama", 3e-3),
    "llama, rate too high": Case("llama", 3e-2, warmup=0),
    "llama, not clipped": Case("llama", 2e-2, warmup=5, clip=0.0, strange=False),
    "llama, one sample": Case("llama", 3e-3, samples=1, length=32, strange=False),
    "gpt2, strange batches": Case("gpt2", 3e-3),
    "gpt2, rate too high": Case("gpt2", 3e-2, warmup=0),
    "gpt2, one sample": Case("gpt2", 1e-3, samples=1, length=16),
}


def batches(case: Case, seed: int) -> Iterator[torch.Tensor]:
    files = sorted(Path(inspect.getfile(sysconfig)).parent.glob("*.py"))[:60]
    text = torch.tensor([*b"\n".join(file.read_bytes() for file in files)])
    chance = torch.Generator().manual_seed(seed)
    for step in itertools.count(1):
        starts = torch.randint(0, len(text) - case.length, (case.samples,), generator=chance).tolist()
        batch = torch.stack([text[start : start + case.length] for start in starts])
        if case.strange and step % STRANGE_EVERY == STRANGE_EVERY - 13:
            batch = [
                torch.full_like(batch, 7),
                torch.randint(0, VOCABULARY, batch.shape, generator=chance),
                batch[:1].expand_as(batch).clone(),
                torch.where(torch.arange(case.length) % 2 == 0, 200, batch),
            ][step // STRANGE_EVERY % 4]
        yield batch


def model_of(family: str, length: int) -> Any:
    if family == "gpt2":
        config = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": length}
    else:
        config = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
        config |= {"intermediate_size": 2 * WIDTH}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=VOCABULARY, **config))


def layer_of(name: str) -> int:
    """The layers begin with the embeddings, and end with the head."""
    if (found := re.search(r"\.(?:h|layers)\.(\d+)\.", name)) is not None:
        return int(found[1]) + 1
    return 0 if re.search("emb|wte|wpe", name) else LAYERS + 1


def squares_of_layers(case: Case, seed: int, steps: int) -> list[list[float]]:
    """By step and layer, the squared norm of the gradients."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = model_of(case.family, case.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.rate, betas=(0.9, 0.95), weight_decay=0.1)
    found = []
    for step, batch in zip(range(1, steps + 1), batches(case, seed), strict=False):
        torch.autograd.backward(model(input_ids=batch, labels=batch, use_cache=False).loss)
        squares = [0.0] * (LAYERS + 2)
        for name, parameter in model.named_parameters():
            squares[layer_of(name)] += float(parameter.grad.double().square().sum())
        found.append(squares)
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.param_groups[0]["lr"] = case.rate * min(1.0, step / max(case.warmup, 1))
        optimizer.step()
        optimizer.zero_grad()
    return found


@dataclass(slots=True)
class Found:
    """``of_bound``: the largest norm in parts of what counts. ``large``: of 32 norms in a row of a stage, how many were large."""

    norms: int = 0
    bounded: int = 0
    of_bound: float = 0.0
    large: int = 0

    def look(self, squares: list[list[float]], cuts: tuple[int, ...]) -> None:
        """At the plan with these cuts."""
        ends = [*zip((0, *cuts), (*cuts, LAYERS + 2), strict=True)]
        known = {Stage(layers, (f"node{at}",), (1,)): Norms() for at, layers in enumerate(ends)}
        for of_step in squares:
            said = [math.sqrt(sum(of_step[slice(*stage.layers)])) for stage in known]
            before, medians = {**known}, [norms.median_of(each) for each in known.values()]
            for place, (stage, its) in enumerate(before.items()):
                bound = norms.bound_of(its, place, said, medians)
                assert bound is not None
                self.norms += 1
                self.bounded += said[place] > bound.most
                self.of_bound = max(self.of_bound, said[place] / bound.most)
                known[stage] = norms.and_another(its, said[place], bound)
                self.large = max(self.large, sum(known[stage].large))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    rows = []
    for name, case in CASES.items():
        found = Found()
        for seed in range(1, arguments.seeds + 1):
            squares = squares_of_layers(case, seed, arguments.steps)
            for stages in (2, 3, 4, LAYERS + 2):
                for cuts in itertools.combinations(range(1, LAYERS + 2), stages - 1):
                    found.look(squares, cuts)
        rows += [
            Row(f"{name}: norms that were bounded", found.bounded, "norms", "all", found.bounded / found.norms),
            Row(f"{name}: the largest norm in parts of its bound", found.of_bound, ""),
            Row(
                f"{name}: large norms among 32 in a row, most",
                found.large,
                "norms",
                "allowed",
                found.large / norms.MANY,
            ),
        ]
        print(f"{name}: {replace(found)}", file=sys.stderr, flush=True)
    show(f"Honest gradient norms, {arguments.steps} steps", rows, arguments.json)


if __name__ == "__main__":
    main()

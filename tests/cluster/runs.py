"""Run files for tests, much smaller than the demo, and what one plain process makes of them."""

from __future__ import annotations

import argparse
import asyncio.events
import dataclasses
import enum
import inspect
import itertools
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtfm.protos.plan_pb2 import Run
from dtfm.protos.run_file.run_file import read_run_file
from tests.cluster.plain import plain_held_out_loss, plain_losses

#: Real text that is quickly read: a few modules of the standard library.
CORPUS = "corpus.txt"

LLAMA = """
[model]
family = "llama"
config = { hidden_size = 32, num_hidden_layers = 4, num_attention_heads = 4, intermediate_size = 64 }
"""


#: In float64, GPT-2 computes everything in float64. Llama does not: transformers rounds its norms to float32, which within some
#: dozen steps turns the last bit of a sum into a difference of 1e-9, in one process as well as in many.
GPT2 = """
[model]
family = "gpt2"
config = { n_embd = 32, n_layer = 3, n_head = 4, n_positions = 64 }
"""


GLOBAL_BATCH, MICRO_BATCH = 20, 2


def run_file(
    *,
    stages: list[int],
    steps: int,
    model: str = LLAMA,
    source: str = CORPUS,
    precision: str = "fp64",
    learning_rate: float = 1e-2,
    checkpoint_every: int = 0,
    compression: str = "off",
    lease: float = 5.0,
    storage: str = "checkpoints",
) -> str:
    """A run with steps of GLOBAL_BATCH samples in micro-batches of MICRO_BATCH. ``stages``: the number of replicas of each stage;
    the run starts when all of them are there. ``storage``: of its checkpoints; by default a folder beside the run file."""
    return f"""
name = "test"
seed = 7
{model}
[data]
source = "{source}"
sequence_length = 32
[train]
steps = {steps}
global_batch = {GLOBAL_BATCH}
micro_batch = {MICRO_BATCH}
learning_rate = {learning_rate!r}
warmup_steps = {min(4, steps)}
precision = "{precision}"
evaluation_samples = 8
[network]
compression = "{compression}"
[cluster]
nodes = {sum(stages)}
stages = {stages}
lease = {lease!r}
[checkpoint]
uri = "{storage}"
every = {checkpoint_every}
"""


def write_corpus(folder: Path) -> None:
    modules = (argparse, asyncio.events, dataclasses, enum, inspect, typing)
    text = "\n".join(inspect.getsource(module) for module in modules)
    (folder / CORPUS).write_text(text)


_alone: dict[tuple[bytes, tuple[str, ...]], tuple[list[float], Iterator[float]]] = {}
"""By training: the known losses, and the generator of the next ones."""


def losses_alone(path: Path, allowed_modules: tuple[str, ...] = (), *, steps: int | None = None) -> list[float]:
    """The loss of every step, or of the first ``steps`` steps, when one plain process trains the run file at ``path``. The
    losses are kept for other runs that train the same."""
    run = read_run_file(path).message("any")
    same = Run(seed=run.seed, model=run.model, data=run.data, train=run.train)
    key = (same.SerializeToString(deterministic=True), allowed_modules)
    _locate_corpus(run, path)
    known, following = _alone.setdefault(key, ([], plain_losses(run, allowed_modules)))
    wanted = steps or run.train.steps
    try:
        known += itertools.islice(following, max(0, wanted - len(known)))
    except BaseException:
        del _alone[key]  # the generator ends with its first exception
        raise
    return known[:wanted]


def held_out_losses_alone(path: Path, steps: int) -> list[float]:
    """The held-out loss after each of the first ``steps`` steps, when one plain process trains the run file at ``path``."""
    run, found = read_run_file(path).message("any"), list[float]()
    _locate_corpus(run, path)
    next(itertools.islice(plain_losses(run, held_out=found), steps, None))
    return found


def held_out_loss(path: Path, module: Any, samples: int) -> float:
    """The mean loss of ``module`` over the first held-out ``samples`` of the run file at ``path``."""
    run = read_run_file(path).message("any")
    _locate_corpus(run, path)
    return plain_held_out_loss(run, module, samples)


def run_at(path: Path) -> Run:
    """The run file at ``path``, as nodes get it."""
    run = read_run_file(path).message("any")
    _locate_corpus(run, path)
    return run


def _locate_corpus(run: Run, path: Path) -> None:
    run.data.source = run.data.source.replace(CORPUS, str(path.parent / CORPUS))

"""Run files for tests: the demo in small, with what a test wants to say about it."""

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

from dtfm.coordinator.config.run_file import read_run_file
from dtfm.protos.plan_pb2 import Run
from tests.cluster.plain import plain_losses

#: Real text that is read in an instant: a few of the standard library's modules.
CORPUS = "corpus.txt"

LLAMA = """
[model]
family = "llama"
config = { hidden_size = 32, num_hidden_layers = 4, num_attention_heads = 4, intermediate_size = 64 }
"""


#: Computes in float64 throughout, unlike Llama, whose norms transformers rounds to float32: over some dozen steps that turns
#: the last bit of a sum into a difference of 1e-9, in one process as in many.
GPT2 = """
[model]
family = "gpt2"
config = { n_embd = 32, n_layer = 3, n_head = 4, n_positions = 64 }
"""


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
) -> str:
    """Steps of 20 samples in micro-batches of 2; ``stages`` are replicas per stage, all of them awaited."""
    return f"""
name = "test"
seed = 7
{model}
[data]
source = "{source}"
sequence_length = 32
[train]
steps = {steps}
global_batch = 20
micro_batch = 2
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
every = {checkpoint_every}
"""


def write_corpus(folder: Path) -> None:
    modules = (argparse, asyncio.events, dataclasses, enum, inspect, typing)
    text = "\n".join(inspect.getsource(module) for module in modules)
    (folder / CORPUS).write_text(text)


_alone: dict[tuple[bytes, tuple[str, ...]], tuple[list[float], Iterator[float]]] = {}
"""By what is trained: the losses known already, and where the next ones come from."""


def losses_alone(path: Path, allowed_modules: tuple[str, ...] = (), *, steps: int | None = None) -> list[float]:
    """Loss of every step, or of the first ``steps``, of the run file at ``path``, trained by one plain process. Runs that
    train the same share the work."""
    run = read_run_file(path).message("any")
    same = Run(seed=run.seed, model=run.model, data=run.data, train=run.train)
    key = (same.SerializeToString(deterministic=True), allowed_modules)
    run.data.source = run.data.source.replace(CORPUS, str(path.parent / CORPUS))
    known, following = _alone.setdefault(key, ([], plain_losses(run, allowed_modules)))
    wanted = steps or run.train.steps
    known += itertools.islice(following, max(0, wanted - len(known)))
    return known[:wanted]

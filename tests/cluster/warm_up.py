"""What each process would load and compute alike after it has begun: the nursery does it once, before it forks."""

from __future__ import annotations

import tomllib

import torch

from dtfm.node.data.samples import Sample
from dtfm.node.model.cost.layer_costs import layer_costs
from dtfm.node.training.preparing import preparation
from dtfm.protos.run_file.run_file import parse_run
from dtfm.scheduler import warm_up as scheduler
from tests.cluster.runs import GPT2, LLAMA, run_file
from tests.node.load_once import load_once

SAMPLE = Sample((32,), torch.int64, 256)
"""Of the data of most run files of tests."""


def warm_up() -> None:
    """Loads the scheduler's compiled code, if there is any, and the models of most tests, which also fills torch's caches. No
    thread is left."""
    if scheduler.is_compiled():
        scheduler.warm_up()
    if torch.cuda.is_available():
        return  # autograd would start a thread for each GPU
    for text in (LLAMA, GPT2):
        run = parse_run(tomllib.loads(run_file(model=text, stages=[1], steps=1)), "the tests").message("any")
        layer_costs(load_once(run.model, SAMPLE), run)  # remembers what each layer keeps
    vars(preparation)["load_model"] = load_once

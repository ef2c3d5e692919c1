"""What one plain process computes that does as a run's log says: it changes the optimizer's settings where an operator did, and
goes back where the run did."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dtfm.node.data.load import load_data
from dtfm.protos.plan_pb2 import FP64, Run
from tests.cluster.plain import Changes, adamw_of, changed, mean_loss, update, whole_batch, whole_model

Event = Mapping[str, Any]


def losses_as_logged(run: Run, events: Sequence[Event]) -> Iterator[float]:
    """The loss of each committed step, in the log's order."""
    torch.set_num_threads(1)
    data, changes = load_data(run), changes_in(events)
    module = whole_model(run, data, ()).to(torch.float64 if run.train.precision == FP64 else torch.float32)
    optimizer = adamw_of(run, module)
    saved = {0: (copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict()))}
    for event in events:
        step = event.get("step", 0)
        if event["event"] == "rolled_back":
            weights, state = saved[step]
            module.load_state_dict(weights)
            optimizer = adamw_of(run, module)
            if not event["weights"]:
                optimizer.load_state_dict(copy.deepcopy(state))
        if event["event"] == "step_committed":
            of_step = run.train.global_batch // run.train.micro_batch
            inputs, labels = whole_batch(run, data, range((step - 1) * of_step, step * of_step))
            loss = mean_loss(module(inputs), labels, per_token=run.train.loss_per_token)
            torch.autograd.backward(loss)
            yield loss.item()
            run = changed(run, changes.get(step, {}))
            update(run, module, optimizer, step)
            saved[step] = copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict())


def changes_in(events: Sequence[Event]) -> Changes:
    """What operators have set of [train] for later steps."""
    found: dict[int, dict[str, float]] = {}
    for event in events:
        if event["event"] == "run_changed" and event["step"]:
            found.setdefault(event["step"], {})[event["key"].removeprefix("train.")] = event["value"]
    return found

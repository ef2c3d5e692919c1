"""WORKLOAD.json of a run file: what a plan can be made from before any machine is rented."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from dtfm.node.data.dataset import load_data, text_sample
from dtfm.node.model.load import load_model
from dtfm.node.model.workload import workload
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.run_file.run_file import CHECKPOINTING, OPTIMIZER_STATE, PRECISIONS

_OF_LAYERS = ("name", "forward_flops", "parameter_bytes", "activation_bytes", "kept_bytes", "working_bytes")
_OF_ALL = ("micro_batches", *(f"{part}_bytes_per_parameter_byte" for part in ("optimizer", "own", "copy")))


def describe(run: Run, allowed_modules: Sequence[str] = ()) -> str:
    """WORKLOAD.json of a run, see scheduler/formats/workload.py. Of its data, only a tokenizer is loaded, or what a user's own
    function makes; of pretrained weights, only what they say of the model. Raises ValueError."""
    if run.model.family == "module":
        data = load_data(run, allowed_modules)
        sample, tokens, tokenizer = data.sample, data.tokens_per_sample, data.tokenizer
    else:
        (sample, tokenizer), tokens = text_sample(run.data), run.data.sequence_length
    costs = workload(load_model(run.model, sample, allowed_modules, tokenizer), run)
    document = {
        "layers": [{size: getattr(layer, size) for size in _OF_LAYERS} for layer in costs.layers],
        **{cost: getattr(costs, cost) for cost in _OF_ALL},
        "checkpointing": _name(costs.activation_checkpointing, CHECKPOINTING),
        "optimizer_state": _name(costs.optimizer_state, OPTIMIZER_STATE),
        "tokens_per_micro_batch": tokens * run.train.micro_batch,
        "precision": _name(run.train.precision, PRECISIONS),
    }
    return json.dumps(document, indent=1)


def _name(value: int, names: Mapping[str, int]) -> str:
    return next(name for name, number in names.items() if number == value)

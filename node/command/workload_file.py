"""WORKLOAD.json of a run file: a plan can be made from it before any machine is rented."""

from __future__ import annotations

import json
from collections.abc import Sequence

from dtfm.node.data.allowed import EVERYTHING
from dtfm.node.data.load import load_data, text_sample
from dtfm.node.data.reaching import give_leave
from dtfm.node.model.cost.layer_costs import layer_costs
from dtfm.node.model.load import load_model
from dtfm.protos.run_file.run_file import RunFile

_OF_LAYERS = (
    "name",
    "forward_flops",
    "parameter_bytes",
    "activation_bytes",
    "kept_bytes",
    "working_bytes",
    "frozen_bytes",
    "orthogonal_bytes",
)


def describe(asked: RunFile, allowed_modules: Sequence[str] = ()) -> str:
    """WORKLOAD.json of a run whose precision is decided, see scheduler/formats/workload.py.

    Of the run's data, only a tokenizer is loaded, or the result of a user's own function. Of pretrained weights, only their
    description of the model. Raises ValueError.
    """
    give_leave(EVERYTHING)  # the run file is this user's own
    run, train = asked.message(""), asked.train
    if run.model.family == "module":
        data = load_data(run, allowed_modules)
        sample, tokens, tokenizer = data.sample, data.tokens_per_sample, data.tokenizer
    else:
        (sample, tokenizer), tokens = text_sample(run.data), run.data.sequence_length
    model = load_model(run.model, sample, allowed_modules, tokenizer)
    model.set_optimizer(run.train.optimizer)
    costs = layer_costs(model, run)
    document = {
        "layers": [{size: getattr(layer, size) for size in _OF_LAYERS} for layer in costs],
        "micro_batches": train.micro_batches,
        "backward_per_forward": model.passes - 1,
        "copy_bytes_per_parameter_byte": asked.copy_bytes_per_parameter_byte,
        "checkpointing": train.activation_checkpointing,
        "optimizer_state": train.optimizer_state,
        "tokens_per_micro_batch": tokens * train.micro_batch,
        "precision": train.precision,
    }
    return json.dumps(document, indent=1)

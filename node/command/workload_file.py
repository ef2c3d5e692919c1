"""WORKLOAD.json of a run file: what a plan can be made from before any machine is rented."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtfm.node.data.dataset import load_data, text_sample
from dtfm.node.model.load import load_model
from dtfm.node.model.workload import workload
from dtfm.protos.plan_pb2 import (
    BF16,
    CHECKPOINTING_AUTO,
    CHECKPOINTING_LAYER,
    CHECKPOINTING_NONE,
    FP32,
    FP64,
    OPTIMIZER_STATE_AUTO,
    OPTIMIZER_STATE_DEVICE,
    OPTIMIZER_STATE_HOST,
    Run,
)

MOST_FILE_BYTES = 1 << 20
"""As the coordinator's largest run file."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {"pretrained": "", "family": "", "config": None, "module": ""},
    "data": {"source": "python-stdlib", "tokenizer": "", "sequence_length": 256, "isolate_documents": False},
    "train": {
        "micro_batch": 4,
        "global_batch": 32,
        "precision": "fp32",
        "activation_checkpointing": "auto",
        "optimizer_state": "auto",
    },
    "network": {"compression": "auto", "reduction": None},
}
"""The keys of a run file that its workload depends on; family, config, tokenizer and reduction have defaults that follow from
others. The coordinator judges the whole file; docs/run-file.md describes it."""

DEFAULT_LLAMA = {"hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 384}

_PRECISIONS = {"fp32": FP32, "bf16": BF16, "fp64": FP64}
_CHECKPOINTING = {"auto": CHECKPOINTING_AUTO, "none": CHECKPOINTING_NONE, "layer": CHECKPOINTING_LAYER}
_OPTIMIZER_STATE = {"auto": OPTIMIZER_STATE_AUTO, "device": OPTIMIZER_STATE_DEVICE, "host": OPTIMIZER_STATE_HOST}

_OF_LAYERS = ("name", "forward_flops", "parameter_bytes", "activation_bytes", "kept_bytes", "working_bytes")
_OF_ALL = ("micro_batches", *(f"{part}_bytes_per_parameter_byte" for part in ("optimizer", "own", "copy")))


def read_run(path: Path) -> Run:
    """What the run file at ``path`` says that its workload depends on. Raises ValueError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; give the path of a run file (TOML)") from None
    if len(raw) > MOST_FILE_BYTES:
        raise ValueError(f"{path} has {len(raw)} bytes; a run file has at most {MOST_FILE_BYTES}")
    try:
        document = tomllib.loads(raw.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    model, data, train, network = (_table(document, name) for name in DEFAULTS)
    family, config = model["family"] or ("" if model["pretrained"] else "llama"), model["config"]
    if config is None:
        config = DEFAULT_LLAMA if family == "llama" else {}
    if not isinstance(config, dict):
        raise ValueError(f"model.config is {config!r:.80}; it must be a table")
    if train["micro_batch"] < 1 or train["global_batch"] < 1 or train["global_batch"] % train["micro_batch"]:
        raise ValueError(
            f"train.global_batch is {train['global_batch']}; it must be a multiple of train.micro_batch, "
            f"{train['micro_batch']}"
        )
    if not 2 <= data["sequence_length"] <= 1 << 20:
        raise ValueError(f"data.sequence_length is {data['sequence_length']}; it must be from 2 to {1 << 20}")
    data["tokenizer"] = data["tokenizer"] or model["pretrained"].partition("@")[0] or "bytes"
    reduction = network["reduction"] or network["compression"]
    return Run(
        model=Run.Model(
            family=family,
            config_json=json.dumps(config, default=str),
            module=model["module"],
            pretrained=model["pretrained"],
        ),
        data=Run.Data(**data),
        train=Run.Train(
            micro_batch=train["micro_batch"],
            global_batch=train["global_batch"],
            precision=_choice("train.precision", train["precision"], _PRECISIONS),
            activation_checkpointing=_choice(
                "train.activation_checkpointing", train["activation_checkpointing"], _CHECKPOINTING
            ),
            optimizer_state=_choice("train.optimizer_state", train["optimizer_state"], _OPTIMIZER_STATE),
        ),
        network=Run.Network(reduction=reduction),
    )


def describe(run: Run, allowed_modules: Sequence[str] = ()) -> str:
    """WORKLOAD.json of a run, see scheduler/formats/workload.py. Of its data, only a tokenizer is loaded, or what a user's own
    function makes; of pretrained weights, only what they say of the model. Raises ValueError."""
    if run.model.family == "module":
        run.data.evaluation_fraction = 0.5
        data = load_data(run, allowed_modules)
        sample, tokens, tokenizer = data.sample, data.tokens_per_sample, data.tokenizer
    else:
        (sample, tokenizer), tokens = text_sample(run.data), run.data.sequence_length
    costs = workload(load_model(run.model, sample, allowed_modules, tokenizer), run)
    document = {
        "layers": [{size: getattr(layer, size) for size in _OF_LAYERS} for layer in costs.layers],
        **{cost: getattr(costs, cost) for cost in _OF_ALL},
        "checkpointing": _name(costs.activation_checkpointing, _CHECKPOINTING),
        "optimizer_state": _name(costs.optimizer_state, _OPTIMIZER_STATE),
        "tokens_per_micro_batch": tokens * run.train.micro_batch,
        "precision": _name(run.train.precision, _PRECISIONS),
    }
    return json.dumps(document, indent=1)


def _table(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The table's keys that matter, with their defaults. Raises ValueError for a value of another type than the default's."""
    table, defaults = document.get(name, {}), DEFAULTS[name]
    if not isinstance(table, dict):
        raise ValueError(f"{name} is {table!r:.80}; it must be a table")
    for key, default in defaults.items():
        if default is not None and type(table.get(key, default)) is not type(default):
            kind = "a whole number" if isinstance(default, int) else "a text"
            raise ValueError(f"{name}.{key} is {table[key]!r:.80}; it must be {kind}")
    return {key: table.get(key, default) for key, default in defaults.items()}


def _choice(key: str, value: str, known: Mapping[str, Any]) -> Any:
    if value not in known:
        raise ValueError(f"{key} is {value!r:.80}; it must be one of {', '.join(known)}")
    return known[value]


def _name(value: int, names: Mapping[str, int]) -> str:
    return next(name for name, number in names.items() if number == value)

"""What a run file asks of machines, where the sizes of its model follow from the configuration: no torch, and no model."""

from __future__ import annotations

import json
from pathlib import Path

from dtfm.coordinator.core.validation.description import workload_of
from dtfm.protos.run_file.run_file import RunFile
from dtfm.scheduler.formats.language_model import KNOWN, language_model_layers
from dtfm.scheduler.model.workload import Workload

BYTES = 256
"""Tokens of the tokenizer "bytes"."""


def workload_of_run(run: RunFile) -> Workload:
    """The workload as `dtfm-node workload` counts it. Raises ValueError where only that can."""
    model, data, train = run.model, run.data, run.train
    family, config, bf16 = model.family, model.config, train.precision == "bf16"
    if model.pretrained:
        try:
            found = json.loads((Path(model.pretrained) / "config.json").read_text())
            family, config = str(found["model_type"]), {key: found[key] for key in KNOWN if key in found}
        except (OSError, ValueError, TypeError, KeyError):
            raise ValueError(f"model.pretrained is {model.pretrained!r:.80}, not a folder with a config.json") from None
    vocabulary = config.get("vocab_size") or (BYTES if data.tokenizer in ("", "bytes") else None)
    if type(vocabulary) is not int or vocabulary < 1:
        raise ValueError(f"the vocabulary of {data.tokenizer!r:.80} is not known; add vocab_size to model.config")
    if train.precision == "fp64" or data.isolate_documents:
        raise ValueError("memory in fp64, or with data.isolate_documents, is not known without the model")
    layers = language_model_layers(family, config, vocabulary, data.sequence_length, train.micro_batch, bf16)
    return workload_of(layers, run)

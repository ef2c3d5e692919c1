"""WORKLOAD.json: the model as the scheduler sees it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeVar

from dtfm.scheduler.formats.fields import check_keys, integer_of, list_of, number_of, read_document, text_of
from dtfm.scheduler.model.memory import Checkpointing, OptimizerState
from dtfm.scheduler.model.workload import Layer, PaperCosts, Workload

Choice = TypeVar("Choice", Checkpointing, OptimizerState)

RATIOS = {"optimizer": 2.0, "own": 0.0, "copy": 0.0}
"""What Workload has of bytes per parameter byte, with what counts where WORKLOAD.json does not say."""
PRECISIONS = ("fp32", "bf16", "fp64")


def parse_workload(text: str) -> Workload:
    """A workload from ``{"layers": [{"name", "forward_flops", "parameter_bytes", "activation_bytes"}],
    "micro_batches", ...}``. FLOPs and bytes are numbers, per micro-batch except ``parameter_bytes``: see Layer and Workload.

    Optional, of a layer: ``kept_bytes`` and ``working_bytes``. Of the workload: ``optimizer_bytes_per_parameter_byte`` (default
    2), ``own_bytes_per_parameter_byte`` and ``copy_bytes_per_parameter_byte`` (default 0); ``checkpointing``, "auto",
    "none" (the default) or "layer"; ``optimizer_state``, "auto", "device" (the default) or "host"; ``paper``; and what no plan
    depends on: ``tokens_per_micro_batch`` (see parse_tokens) and ``precision`` (see parse_precision).
    """
    ratios = {f"{part}_bytes_per_parameter_byte": default for part, default in RATIOS.items()}
    words = ("checkpointing", "optimizer_state", "tokens_per_micro_batch", "precision")
    document = read_document(text, {"layers", "micro_batches", *ratios, *words, "paper"})
    sizes, optional = ("forward_flops", "parameter_bytes", "activation_bytes"), ("kept_bytes", "working_bytes")
    layers = []
    for index, entry in enumerate(list_of(document, "layers", "")):
        path = f"layers[{index}]"
        check_keys(entry, path, {"name", *sizes, *optional})
        more = {size: number_of(entry, size, path) for size in optional if size in entry}
        layers.append(Layer(text_of(entry, "name", path), *(number_of(entry, size, path) for size in sizes), **more))
    paper = None
    if document.get("paper") is not None:
        entry = document["paper"]
        check_keys(entry, "paper", {"stages", "replicas", "gradient_gigabytes", "activation_gigabytes"})
        paper = PaperCosts(
            stages=integer_of(entry, "stages", "paper"),
            replicas=integer_of(entry, "replicas", "paper"),
            gradient_gigabytes=number_of(entry, "gradient_gigabytes", "paper"),
            activation_gigabytes=number_of(entry, "activation_gigabytes", "paper"),
        )
    if "tokens_per_micro_batch" in document:
        integer_of(document, "tokens_per_micro_batch", "")
    if "precision" in document and document["precision"] not in PRECISIONS:
        raise ValueError(f"precision is {document['precision']!r:.80}; it must be one of {', '.join(PRECISIONS)}")
    return Workload(
        layers=tuple(layers),
        micro_batches=integer_of(document, "micro_batches", ""),
        paper=paper,
        checkpointing=_choice(document, "checkpointing", Checkpointing, Checkpointing.NONE),
        optimizer_state=_choice(document, "optimizer_state", OptimizerState, OptimizerState.DEVICE),
        **{
            ratio: number_of(document, ratio, "") if ratio in document else default for ratio, default in ratios.items()
        },
    )


def parse_tokens(text: str) -> int | None:
    """The tokens of a micro-batch, ``tokens_per_micro_batch`` in a text that parse_workload reads; None where it does not say."""
    document: dict[str, int] = json.loads(text)
    return document.get("tokens_per_micro_batch")


def parse_precision(text: str) -> str:
    """The precision that is computed in, ``precision`` in a text that parse_workload reads: one of PRECISIONS. A text that does
    not say it is of a run in bf16 if it has copies of weights to compute with, otherwise in fp32."""
    document: dict[str, Any] = json.loads(text)
    copies = document.get("copy_bytes_per_parameter_byte", 0.0)
    return str(document.get("precision") or ("bf16" if copies else "fp32"))


def _choice(document: dict[str, Any], key: str, choices: Iterable[Choice], default: Choice) -> Choice | None:
    """None for "auto"."""
    if key not in document:
        return default
    known: dict[object, Choice | None] = {"auto": None} | {str(choice): choice for choice in choices}
    value = document[key]
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{key} is {value!r:.80}; it must be one of {', '.join(map(str, known))}")
    return known[value]

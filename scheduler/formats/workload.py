"""WORKLOAD.json: the model as the scheduler sees it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, TypeAdapter

from dtfm.scheduler.formats.fields import Whole, read_document
from dtfm.scheduler.model.memory import Checkpointing, OptimizerState
from dtfm.scheduler.model.workload import Layer, PaperCosts, Workload


class _Workload(BaseModel, extra="forbid"):
    layers: tuple[Layer, ...]
    micro_batches: Whole
    backward_per_forward: float = 2.0
    optimizer_bytes_per_parameter_byte: float = 2.0
    copy_bytes_per_parameter_byte: float = 0.0
    checkpointing: Literal["auto", "none", "layer"] = "none"
    optimizer_state: Literal["auto", "device", "host"] = "device"
    tokens_per_micro_batch: Whole | None = None
    precision: Literal["fp32", "bf16", "fp64"] | None = None
    paper: PaperCosts | None = None


_ADAPTER = TypeAdapter(_Workload)


def parse_workload(text: str) -> tuple[Workload, int | None, str]:
    """A workload from ``{"layers": [{"name", "forward_flops", "parameter_bytes", "activation_bytes"}], "micro_batches", ...}``.
    FLOPs and bytes are numbers, per micro-batch except ``parameter_bytes``: see Layer and Workload.

    Optional keys of a layer are ``kept_bytes``, ``working_bytes``, ``frozen_bytes`` and ``orthogonal_bytes``.

    Optional keys of the workload:
    - ``backward_per_forward`` (default 2).
    - ``optimizer_bytes_per_parameter_byte`` (default 2) and ``copy_bytes_per_parameter_byte`` (default 0).
    - ``checkpointing``: "auto", "none" (the default) or "layer".
    - ``optimizer_state``: "auto", "device" (the default) or "host".
    - ``paper``, for the paper's objective alone: ``{"stages", "replicas", "gradient_gigabytes", "activation_gigabytes"}``, see
      PaperCosts.

    Two further keys do not change any plan, and are returned beside the workload:
    - ``tokens_per_micro_batch``; None if it is missing.
    - ``precision``: "fp32", "bf16" or "fp64". Without it, bf16 if there are copies of weights to compute with, otherwise fp32.
    """
    read = read_document(_ADAPTER, text)
    workload = Workload(
        layers=read.layers,
        micro_batches=read.micro_batches,
        backward_per_forward=read.backward_per_forward,
        optimizer_bytes_per_parameter_byte=read.optimizer_bytes_per_parameter_byte,
        copy_bytes_per_parameter_byte=read.copy_bytes_per_parameter_byte,
        checkpointing=None if read.checkpointing == "auto" else Checkpointing(read.checkpointing),
        optimizer_state=None if read.optimizer_state == "auto" else OptimizerState(read.optimizer_state),
        paper=read.paper,
    )
    precision = read.precision or ("bf16" if read.copy_bytes_per_parameter_byte else "fp32")
    return workload, read.tokens_per_micro_batch, precision

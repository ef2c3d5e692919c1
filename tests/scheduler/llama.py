"""Workloads of Llama models, from their shapes: sequences of 2048 tokens, micro-batches of one, bf16 with weights in 32 bits."""

from __future__ import annotations

from dataclasses import dataclass

from dtfm.scheduler.model.memory import Checkpointing, OptimizerState
from dtfm.scheduler.model.workload import Layer, Workload

TOKENS = 2048
VOCABULARY = 32_000
KEPT_PER_HIDDEN_VALUE = 34
"""Bytes that a decoder layer keeps per token and hidden value, without its attention scores (Korthikanti et al. 2022, section
4.1)."""
CHUNK = 256
"""Tokens whose logits the head has at the same time; some 10 bytes for each logit: in bf16, in 32 bits, and their gradient."""


@dataclass(frozen=True)
class Shape:
    """``keys`` is the width of all keys together: less than ``hidden`` where several heads share them."""

    layers: int
    hidden: int
    intermediate: int
    keys: int

    @property
    def decoder_parameters(self) -> int:
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.keys
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden


SHAPES = {
    "1.1B": Shape(22, 2048, 5632, 256),
    "7B": Shape(32, 4096, 11008, 4096),
    "13B": Shape(40, 5120, 13824, 5120),
    "70B": Shape(80, 8192, 28672, 1024),
}


def llama(
    name: str,
    micro_batches: int = 64,
    checkpointing: Checkpointing | None = None,
    optimizer_state: OptimizerState | None = None,
) -> Workload:
    shape = SHAPES[name]
    output = 2.0 * TOKENS * shape.hidden
    decoder = Layer(
        "decoder",
        2.0 * TOKENS * shape.decoder_parameters + 2.0 * TOKENS**2 * shape.hidden,
        4.0 * shape.decoder_parameters,
        output,
        float(KEPT_PER_HIDDEN_VALUE * TOKENS * shape.hidden),
        2.0 * 2 * TOKENS * shape.intermediate,
    )
    table = 4.0 * VOCABULARY * shape.hidden
    embedding = Layer("embedding", 0.0, table, output, output, output)
    head = Layer(
        "head",
        2.0 * TOKENS * VOCABULARY * shape.hidden,
        table + 4 * shape.hidden,
        4.0,
        3 * output,
        10.0 * CHUNK * VOCABULARY + 2 * output,
    )
    return Workload(
        (embedding, *(decoder,) * shape.layers, head),
        micro_batches,
        copy_bytes_per_parameter_byte=0.5,
        checkpointing=checkpointing,
        optimizer_state=optimizer_state,
    )

"""The table of the run file that says how tensors are compressed."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, field_validator

from dtfm.protos.run_file.table import Table

Codec = Literal["auto", "off", "raw16", "i8b256", "i4b64"]

SparseCodec = Literal["topk", "top64"]

ExchangeCodec = Literal[Codec, SparseCodec]


class Network(Table):
    """Compression of the tensors that nodes send each other while they train. State is never compressed.

    - `"auto"` chooses for each link. It takes the gentlest of off, raw16 and i8b256 that hides the transfer behind computing.
    - `"off"` sends tensors unchanged.
    - `"raw16"` rounds to bfloat16.
    - `"i8b256"` quantizes to 8 bits in blocks of 256.
    - `"i4b64"` quantizes to 4 bits in blocks of 64.
    - `"topk"`, for `exchange` alone, sends the 8 largest of each 256 elements. Most of the rest counts in later exchanges.
    - `"top64"`, for `exchange` alone, does so with the 64 largest of each 4,096 elements, in 2 bits.
    """

    compression: Codec = Field(default="auto", description="Codec of all tensors for which no own key is given.")
    activations: Codec = Field(
        default_factory=lambda known: known.get("compression", "auto"),
        description="Codec of activations. Default: `compression`.",
    )
    gradients: Codec = Field(
        default_factory=lambda known: known.get("compression", "auto"),
        description="Codec of the gradients that flow back through the pipeline. Default: `compression`.",
    )
    reduction: Codec = Field(
        default_factory=lambda known: known.get("compression", "auto"),
        description="Codec of the gradients that the replicas of a stage reduce. Default: `compression`.",
    )
    exchange: ExchangeCodec = Field(
        default_factory=lambda known: known.get("compression", "auto"),
        description='Codec of the changes that islands exchange (`train.rounds`). "auto" is "i4b64": no computing hides an '
        "exchange, and 4 bits cost nothing in the measurement. Default: `compression`.",
    )

    @field_validator("exchange")
    @classmethod
    def _auto_is_known(cls, codec: ExchangeCodec) -> ExchangeCodec:
        return "i4b64" if codec == "auto" else codec

    @property
    def exchanges_sparsely(self) -> bool:
        """Whether an island sends its largest changes alone, and those to all others."""
        return self.exchange in get_args(SparseCodec)

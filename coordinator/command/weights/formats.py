"""The formats of numbers in weights. NumPy, which takes long to load, is not needed to name them: see converting.py."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Format(StrEnum):
    """A format of an export's weights, as ``--dtype`` names it."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def stored(self) -> str:
        """Its name in a safetensors file."""
        return {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}[self.value]

    @property
    def torch(self) -> str:
        """Its name in config.json."""
        return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[self.value]


SIZES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL"), 1),
}
"""Bytes of a number, by its format's name in a safetensors file."""

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""The formats that are converted."""

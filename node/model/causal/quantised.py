"""Frozen matrices in 8 or 4 bits: bitsandbytes packs them and computes with them.

The matrices of the decoder layers are packed, as transformers packs them. Everything is packed on the CPU, so that replicas with
other devices compute with the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from dtfm.installed import install_line
from dtfm.node.model.bucket import HOST
from dtfm.node.model.frozen import Layout, Packing
from dtfm.node.model.frozen_cache import Parts

log = logging.getLogger(__name__)

OUTLIERS = 6.0
"""Above this size, numbers that enter a matrix of 8 bits are multiplied apart on a GPU (arXiv 2208.07339), as in transformers."""
_BLOCK, _BLOCK_OF_SCALES = 64, 256
"""The numbers that share a scale in 4 bits, and the scales that share one (arXiv 2305.14314)."""
_NUMBERS, _SCALES = 16, 256
"""The entries of a matrix's tables in 4 bits: of its numbers, and of its scales."""


def import_bitsandbytes(asked: str) -> Any:
    """The library. Raises ValueError if it is missing. ``asked``: what needs it, as the user wrote it."""
    try:
        import bitsandbytes
    except Exception as problem:  # it also looks for drivers
        raise ValueError(
            f"{asked} needs bitsandbytes, which cannot be imported here ({problem}); install it: {install_line('node')}"
        ) from None
    return bitsandbytes


class Quantised(Packing):
    """Packs the matrices of ``module``'s decoder layers as ``weights`` says: "int8" or "nf4". ``decoder`` is the name of these
    layers."""

    def __init__(self, weights: str, module: PreTrainedModel, decoder: str) -> None:
        """Raises ValueError if bitsandbytes is missing."""
        bitsandbytes = import_bitsandbytes(f'model.weights = "{weights}"')
        self._library: Any = bitsandbytes
        self._weights = weights
        self.name = f"{weights}, bitsandbytes {bitsandbytes.__version__}"
        self._packs = {
            f"{name}.weight"
            for name, part in module.named_modules()
            if type(part) is nn.Linear and name.startswith(f"{decoder}.") and not part.weight.requires_grad
        }

    def packed(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
        if name not in self._packs:
            return super().packed(name, value, dtype)
        return cast(nn.Parameter, self._parameter(value.to(dtype)).to(HOST))

    def placed(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        if parameter.device == device or (not hasattr(parameter, "bnb_quantized") and not hasattr(parameter, "SCB")):
            return super().placed(parameter, device)
        return cast(nn.Parameter, parameter.to(device))

    def installable(self, parameter: nn.Parameter) -> nn.Parameter:
        """A module takes the scales out of its parameter of 8 bits: it gets a parameter of its own."""
        if not hasattr(parameter, "SCB"):
            return parameter
        made = self._library.nn.Int8Params(
            parameter.data, requires_grad=False, has_fp16_weights=False, CB=parameter.data, SCB=parameter.SCB
        )
        return cast(nn.Parameter, made)

    def prepare(self, module: nn.Module, names: Iterable[str], dtype: torch.dtype) -> None:
        for name in self._packs.intersection(names):
            path = name.rpartition(".")[0]
            around, _, own = path.rpartition(".")
            linear = module.get_submodule(path)
            assert isinstance(linear, nn.Linear)
            setattr(module.get_submodule(around), own, self._module(linear, dtype))

    def layout(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Layout:
        if name not in self._packs:
            return super().layout(name, shape, dtype)
        if self._weights == "int8":
            return {"values": (torch.int8, tuple(shape)), "scales": (torch.float32, (shape[0],))}
        scales = -(-shape.numel() // _BLOCK)
        return {
            "values": (torch.uint8, (-(-shape.numel() // 2), 1)),
            "table": (torch.float32, (_NUMBERS,)),
            "scales": (torch.uint8, (scales,)),
            "table_of_scales": (torch.float32, (_SCALES,)),
            "scales_of_scales": (torch.float32, (-(-scales // _BLOCK_OF_SCALES),)),
            "mean_of_scales": (torch.float32, ()),
        }

    def parts(self, parameter: nn.Parameter) -> Parts:
        packed: Any = parameter
        if hasattr(packed, "SCB"):
            return {"values": packed.data, "scales": packed.SCB}
        if not hasattr(packed, "bnb_quantized"):
            return super().parts(parameter)
        state = packed.quant_state
        return {
            "values": packed.data,
            "table": state.code,
            "scales": state.absmax,
            "table_of_scales": state.state2.code,
            "scales_of_scales": state.state2.absmax,
            "mean_of_scales": state.offset,
        }

    def joined(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
        if "scales" not in parts:
            return super().joined(parts, shape, dtype)
        modules, values = self._library.nn, parts["values"]
        if self._weights == "int8":
            scales = parts["scales"]
            made = modules.Int8Params(values, requires_grad=False, has_fp16_weights=False, CB=values, SCB=scales)
            return cast(nn.Parameter, made)
        state_of = self._library.functional.QuantState
        of_scales = state_of(
            absmax=parts["scales_of_scales"],
            blocksize=_BLOCK_OF_SCALES,
            code=parts["table_of_scales"],
            dtype=torch.float32,
        )
        state = state_of(
            absmax=parts["scales"],
            shape=shape,
            code=parts["table"],
            blocksize=_BLOCK,
            quant_type="nf4",
            dtype=dtype,
            offset=parts["mean_of_scales"],
            state2=of_scales,
        )
        made = modules.Params4bit(
            values, quant_state=state, blocksize=_BLOCK, compress_statistics=True, quant_type="nf4", bnb_quantized=True
        )
        return cast(nn.Parameter, made)

    def unpacked(self, parameter: nn.Parameter) -> torch.Tensor:
        """The numbers of a matrix in 4 bits, as they are computed with."""
        packed: Any = parameter
        return cast(torch.Tensor, self._library.functional.dequantize_4bit(packed.data, packed.quant_state))

    def unpacked_bytes(self, name: str, shape: torch.Size, dtype: torch.dtype) -> int:
        return shape.numel() * dtype.itemsize if name in self._packs else 0

    def _parameter(self, value: torch.Tensor) -> Any:
        modules = self._library.nn
        if self._weights == "int8":
            return modules.Int8Params(value, requires_grad=False, has_fp16_weights=False)
        return modules.Params4bit(value, requires_grad=False, compress_statistics=True, quant_type="nf4")

    def _module(self, linear: nn.Linear, dtype: torch.dtype) -> nn.Module:
        """The module that computes with the packed matrix, in place of ``linear``."""
        modules, has_bias = self._library.nn, linear.bias is not None
        sizes: tuple[int, int] = linear.in_features, linear.out_features
        made: nn.Module
        if self._weights == "int8":
            made = modules.Linear8bitLt(*sizes, has_bias, has_fp16_weights=False, threshold=OUTLIERS, device="meta")
        else:
            made = modules.Linear4bit(*sizes, has_bias, compute_dtype=dtype, quant_type="nf4", device="meta")
        # Otherwise bitsandbytes changes packed matrices in place for evaluations.
        made.train()
        made.bias = linear.bias
        return made

"""Initial values of the parameters: a function of (seed, bucket) alone, by the model's own rules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


def initial_values(
    parts: Mapping[str, nn.Module], initialise: Callable[[nn.Module], None], seed: int, bucket: int
) -> dict[str, torch.Tensor]:
    """Initial values of all parameters of these modules, by their names in the model. The modules' own may be on meta.

    They are drawn on the CPU in float32, for any device and precision. So a run starts from the same weights, wherever its
    layers are placed. ``initialise`` sets one module's parameters; it is called for children before their parents, as by
    PyTorch's `Module.apply`.

    Raises:
        ValueError: ``initialise`` leaves a parameter unset.
    """
    values: dict[str, torch.Tensor] = {}
    with _randomness(seed, bucket), torch.no_grad():
        for root, given in parts.items():
            part = copy.deepcopy(given).to_empty(device="cpu")
            for parameter in part.parameters():
                parameter.fill_(torch.nan)
                parameter._is_hf_initialized = False  # type: ignore[attr-defined]  # transformers' mark for "leave alone"
            part.apply(initialise)
            values |= {f"{root}.{name}": p.detach() for name, p in part.named_parameters(remove_duplicate=False)}
    for name, value in values.items():
        if value.isnan().any():
            raise ValueError(
                f"parameter {name} is not set by the model's own initialisation: give its module a reset_parameters() "
                "that sets it, or choose another model.family"
            )
    return values


@contextmanager
def _randomness(seed: int, bucket: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), _NumpyDraws(np.random.Philox(np.random.SeedSequence([seed, bucket]))):
        # For the rare draws that are not caught below.
        torch.default_generator.manual_seed((seed * 1_000_003 + bucket) % 2**63)
        yield


class _NumpyDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes normal and uniform draws from NumPy: PyTorch's differ in the last bits between CPUs with and without AVX2, and
    replicas must start from the same bits."""

    def __init__(self, bits: np.random.BitGenerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = np.random.Generator(bits)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.normal_.default:
            tensor, mean, std = _arguments(args, kwargs, mean=0.0, std=1.0)
            draws = self._generator.standard_normal(tuple(tensor.shape), dtype=np.float32)
            return tensor.copy_(torch.from_numpy(np.asarray(draws))).mul_(std).add_(mean)
        if func is torch.ops.aten.uniform_.default:
            tensor, low, high = _arguments(args, kwargs, **{"from": 0.0, "to": 1.0})
            draws = self._generator.random(tuple(tensor.shape), dtype=np.float32)
            return tensor.copy_(torch.from_numpy(np.asarray(draws))).mul_(high - low).add_(low)
        return func(*args, **(kwargs or {}))


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any] | None, **defaults: float) -> tuple[Any, Any, Any]:
    """The tensor and the two numbers of a draw, given by position or by name."""
    given = dict(zip(defaults, args[1:], strict=False)) | (kwargs or {})
    first, second = (given.get(name, default) for name, default in defaults.items())
    return args[0], first, second

"""A bucket: the parameters that are reduced, transferred and checkpointed together, and what the optimizer knows of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# A bucket's state is its parameters, then AdamW's two moments, each as many elements as the parameters.
STATE_TENSORS = 3

LOADED_AT_ONCE = 1 << 20
"""Bytes that are copied on their way into a tensor, which torch takes from memory alone that can be written to."""


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """One bucket of a model.

    ``layers`` are the numbers of the layers that use it: bucket i below the number of layers is layer i's own, the later
    ones hold one parameter each that several layers share. ``parameters`` are full state-dict names and shapes in the
    order in which they lie in the flat tensors; a shared parameter goes by the first of its names.
    """

    index: int
    layers: tuple[int, ...]
    parameters: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def size(self) -> int:
        """Number of parameter elements."""
        return sum(math.prod(shape) for _, shape in self.parameters)


def bucket_bytes(spec: BucketSpec, dtype: torch.dtype) -> int:
    """Size of the bucket's state (parameters and both moments) in bytes."""
    return STATE_TENSORS * spec.size * dtype.itemsize


class Bucket:
    """A bucket's flat tensors, all 1-D, contiguous, of shape [spec.size], one dtype and one device.

    The model's parameters are views into ``parameters`` and their ``.grad`` views into ``gradients``: backward accumulates
    there in place. Zero gradients by filling; never by replacing. There are none until they are first asked for: who but copies
    the state needs no memory for them.
    """

    def __init__(self, spec: BucketSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.spec = spec
        self.parameters = torch.zeros(spec.size, dtype=dtype, device=device)
        self.exp_avg = torch.zeros_like(self.parameters)
        self.exp_avg_sq = torch.zeros_like(self.parameters)
        self._gradients: torch.Tensor | None = None

    @property
    def gradients(self) -> torch.Tensor:
        if self._gradients is None:
            self._gradients = torch.zeros_like(self.parameters)
        return self._gradients

    @property
    def state(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.parameters, self.exp_avg, self.exp_avg_sq

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """``flat`` ([spec.size]) cut into the bucket's parameters by name, sharing its memory."""
        pieces = torch.split(flat, [math.prod(shape) for _, shape in self.spec.parameters])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.spec.parameters, pieces, strict=True)}

    def export(self) -> tuple[memoryview, memoryview, memoryview]:
        """The state's bytes: parameters, exp_avg, exp_avg_sq, native (little-endian) order, without copying on a CPU.

        On a CPU they are the live tensors: read them before the next step is applied.
        """
        parameters, exp_avg, exp_avg_sq = (_bytes(tensor.detach().cpu()) for tensor in self.state)
        return parameters, exp_avg, exp_avg_sq

    def load(self, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Writes ``data`` into the state from byte ``offset`` of what `export` would give, on.

        Raises:
            ValueError: ``data`` does not lie within the state.
        """
        source = memoryview(data).cast("B")
        total = bucket_bytes(self.spec, self.parameters.dtype)
        if offset < 0 or offset + len(source) > total:
            raise ValueError(
                f"bucket {self.spec.index} has {total} bytes of state, but bytes {offset} to {offset + len(source)} "
                "arrived: the sender has another model, or another precision"
            )
        each = total // STATE_TENSORS
        for number, tensor in enumerate(self.state):
            begin, end = max(offset, number * each), min(offset + len(source), (number + 1) * each)
            for start in range(begin, end, LOADED_AT_ONCE):
                stop = min(start + LOADED_AT_ONCE, end)
                piece = torch.frombuffer(bytearray(source[start - offset : stop - offset]), dtype=torch.uint8)
                tensor.view(torch.uint8)[start - number * each : stop - number * each].copy_(piece)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory."""
    return tensor.view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")

"""Dropout that every node computes alike: a mask follows from the run's seed, the micro-batch, the module's name and the place of
each number.

So replicas, a step that is done again and an audit drop the same numbers. A generator of random numbers would have a state, and
differs between devices. Here the mask is a hash of integers, by operations of torch that give the same bits on each device.
Nothing moves between host and device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import nn


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One of a run with this ``seed``. ``number`` counts all of the run's, over all steps."""

    seed: int
    number: int


_COMPUTED: ContextVar[MicroBatch | None] = ContextVar("computed", default=None)


@contextmanager
def dropping(micro_batch: MicroBatch | None) -> Iterator[None]:
    """Inside, in this thread, modules drop what they should of this micro-batch. With None they drop nothing, as in evaluations
    and where nobody has called this."""
    token = _COMPUTED.set(micro_batch)
    try:
        yield
    finally:
        _COMPUTED.reset(token)


def dropping_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For a layer that is computed now, and again for the backward pass, perhaps in another thread: the contexts of both."""
    return nullcontext(), dropping(_COMPUTED.get())


class Dropout(nn.Module):
    """Sets a ``share`` of its input's numbers to zero, and divides the others by 1 - share. ``name``: the adapted module's."""

    def __init__(self, share: float, name: str) -> None:
        super().__init__()
        self._share, self._name = share, name

    # A compiled layer would keep the first micro-batch's mask.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        micro_batch = _COMPUTED.get()
        if micro_batch is None:
            return x
        mask = dropped(micro_batch, self._name, self._share, x.shape, x.device)
        return x.masked_fill(mask, 0.0) * (1 / (1 - self._share))


def dropped(micro_batch: MicroBatch, name: str, share: float, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """Which numbers of a tensor of this ``shape`` a module drops: bool."""
    key = blake3(f"{micro_batch.seed} {micro_batch.number} {name}".encode()).digest(8)
    one, other = (int.from_bytes(part, "little", signed=True) for part in (key[:4], key[4:]))
    columns = shape[-1]
    rows = shape.numel() // max(1, columns)
    of_rows = _mixed(torch.arange(rows, dtype=torch.int32, device=device) ^ one)
    of_columns = _mixed(torch.arange(columns, dtype=torch.int32, device=device) ^ other)
    mixed = _mixed(of_rows[:, None] ^ of_columns)
    return (mixed < round(share * 2**32) - 2**31).view(shape)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """A hash of each int32, in place (https://nullprogram.com/blog/2018/07/31, lowbias32). Products wrap around, and shifts of
    negative numbers bring ones in, which are cleared."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x

"""A bucket: parameters that are reduced, transferred and stored together, with their optimizer state."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from blake3 import blake3

from dtfm.kernels.digest import digest
from dtfm.scheduler.model.rounds import NO_ROUNDS, Rounds

STATE_TENSORS = 3
"""A bucket's state: the parameters and AdamW's two moments, all of one size."""

OUTER_TENSORS = 2
"""In a run with rounds also the parameters as of the last exchange (the anchor), and the momentum of exchanges."""

HOST = torch.device("cpu")
"""The host's memory, as a place for state."""

LOADED_AT_ONCE = 1 << 20
"""Bytes of read-only memory that are copied at a time while loading: torch.frombuffer wants writable memory."""


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """One bucket of a model.

    ``layers`` are the numbers of the layers that use it. Bucket i below the number of layers belongs to layer i alone; each
    later one holds a single parameter that several layers share. ``parameters`` are full state-dict names and shapes in the
    order of the flat tensors; a shared parameter has the first of its names. ``rounds`` are the run's.
    """

    index: int
    layers: tuple[int, ...]
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    rounds: Rounds = NO_ROUNDS

    @property
    def tensors(self) -> int:
        """The number of tensors of its state."""
        return STATE_TENSORS + (OUTER_TENSORS if self.rounds.length else 0)

    @property
    def followed(self) -> int:
        """The number of tensors, the last ones, that a standby copies: with rounds the outer ones, which all islands share."""
        return OUTER_TENSORS if self.rounds.length else STATE_TENSORS

    @property
    def size(self) -> int:
        """The number of parameter elements."""
        return sum(math.prod(shape) for _, shape in self.parameters)

    def used_by(self, first: int, past_last: int) -> bool:
        """Whether one of the layers [first, past_last) uses it."""
        return any(first <= layer < past_last for layer in self.layers)


def bucket_bytes(spec: BucketSpec, dtype: torch.dtype) -> int:
    """Size of the bucket's state in bytes."""
    return spec.tensors * spec.size * dtype.itemsize


class Bucket:
    """A bucket's flat tensors, all 1-D, contiguous, of shape [spec.size] and one dtype.

    The state is in the memory of ``home``, but for the ``outer`` tensors (anchor, momentum), which are used once in a round and
    lie in the host's; the ``gradients`` are on ``device``, where they are computed. Gradients are added in
    place: zero them by filling, never by replacing. They are allocated on first access, so that a copy of the state takes no
    memory for them. ``donors``: the nodes that gave the state to this one, while nobody has found yet that it is right.
    """

    def __init__(
        self, spec: BucketSpec, device: torch.device, dtype: torch.dtype, home: torch.device | None = None
    ) -> None:
        self.spec = spec
        self.device = device
        self.donors: tuple[str, ...] = ()
        self.parameters = torch.zeros(spec.size, dtype=dtype, device=home or device)
        self.exp_avg = torch.zeros_like(self.parameters)
        self.exp_avg_sq = torch.zeros_like(self.parameters)
        self.outer = tuple(torch.zeros_like(self.parameters, device=HOST) for _ in range(spec.tensors - STATE_TENSORS))
        self._gradients: torch.Tensor | None = None

    @property
    def home(self) -> torch.device:
        return self.parameters.device

    @property
    def unfollowed_bytes(self) -> int:
        """The size of the tensors before those that a standby copies."""
        return (self.spec.tensors - self.spec.followed) * self.parameters.nbytes

    @property
    def gradients(self) -> torch.Tensor:
        if self._gradients is None:
            self._gradients = torch.zeros_like(self.parameters, device=self.device)
        return self._gradients

    @torch.no_grad()
    def begin_island(self) -> None:
        """As a new island does: with the parameters of the last exchange, and moments of zero. Others that share the moments keep
        theirs."""
        self.parameters.copy_(self.outer[0])
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.exp_avg), torch.zeros_like(self.exp_avg_sq)

    def placed(self, device: torch.device, home: torch.device) -> Bucket:
        """This bucket if it is there already, else one with its state there, sharing what need not move."""
        if (self.device, self.home) == (device, home):
            return self
        other = copy.copy(self)
        other.device, other._gradients = device, None
        other.parameters, other.exp_avg, other.exp_avg_sq = (tensor.to(home) for tensor in self.state[:STATE_TENSORS])
        return other

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return self.parameters, self.exp_avg, self.exp_avg_sq, *self.outer

    def digests(self) -> tuple[bytes, bytes]:
        """Of the whole state, and of all but its moments: BLAKE3 of the BLAKE3 of each tensor, which is taken where it lies."""
        each = [*map(digest, self.state)]
        return blake3(b"".join(each)).digest(), blake3(b"".join((each[0], *each[STATE_TENSORS:]))).digest()

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """``flat`` ([spec.size]) cut into the bucket's parameters by name, sharing its memory."""
        pieces = torch.split(flat, [math.prod(shape) for _, shape in self.spec.parameters])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.spec.parameters, pieces, strict=True)}

    def read(self, begin: int = 0, end: int | None = None) -> memoryview:
        """A copy, in the host's memory, of bytes [begin, end) of the state, by default of all of them: the tensors of ``state``,
        little-endian.
        """
        each = self.parameters.nbytes
        end = self.spec.tensors * each if end is None else end
        copied = torch.empty(end - begin, dtype=torch.uint8)
        for number, tensor in enumerate(self.state):
            start, stop = max(begin, number * each), min(end, (number + 1) * each)
            if start < stop:
                part = tensor.detach().view(torch.uint8)[start - number * each : stop - number * each]
                copied[start - begin : stop - begin].copy_(part)
        return copied.numpy().data if len(copied) else memoryview(b"")

    def load(self, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Writes ``data`` into the state, starting at byte ``offset`` of what `read` returns.

        Raises:
            ValueError: ``data`` extends past the state.
        """
        source = memoryview(data).cast("B")
        total = bucket_bytes(self.spec, self.parameters.dtype)
        if offset < 0 or offset + len(source) > total:
            raise ValueError(
                f"bucket {self.spec.index} has {total} bytes of state, but bytes {offset} to {offset + len(source)} "
                "arrived: the sender has another model, or another precision"
            )
        each = total // self.spec.tensors
        for number, tensor in enumerate(self.state):
            begin, end = max(offset, number * each), min(offset + len(source), (number + 1) * each)
            for start in range(begin, end, LOADED_AT_ONCE):
                stop = min(start + LOADED_AT_ONCE, end)
                piece = source[start - offset : stop - offset]
                loaded = torch.frombuffer(bytearray(piece) if piece.readonly else piece, dtype=torch.uint8)
                tensor.view(torch.uint8)[start - number * each : stop - number * each].copy_(loaded)

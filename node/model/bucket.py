"""A bucket: parameters that are reduced, transferred and stored together, with their optimizer state."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3

from dtfm.kernels.digest import digest

STATE_TENSORS = 3
"""A bucket's state: the parameters and two moments. A matrix that Muon updates has no part in the second moment."""

UPDATES_DTYPE = torch.bfloat16
"""Of Muon's updates."""

HOST = torch.device("cpu")
"""The host's memory, as a place for state."""

LOADED_AT_ONCE = 1 << 20
"""Bytes of read-only memory that are copied at a time while loading: torch.frombuffer wants writable memory."""


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """One bucket of a model.

    Bucket i below the number of layers belongs to layer i alone. Each later bucket holds a single parameter that several layers
    share.
    """

    index: int
    layers: tuple[int, ...]
    """The numbers of the layers that use the bucket."""
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """Full state-dict names and shapes, in the order of the flat tensors. A shared parameter has the first of its names."""
    has_momentum: bool = False
    """The exchanges of islands have momentum in this run."""
    kept: frozenset[str] = frozenset()
    """Parameters that the family says weight decay does not apply to."""
    orthogonal: frozenset[str] = frozenset()
    """Matrices that Muon updates; AdamW updates the others."""
    further_names: tuple[str, ...] = ()
    """Of the bucket's only parameter, where those who read the weights want it under each of its names."""

    def decays(self, name: str, dimensions: int) -> bool:
        """Whether weight decay applies to the parameter: as usual, to matrices, not to biases and norms."""
        return dimensions >= 2 and name not in self.kept

    @property
    def tensors(self) -> int:
        """The number of tensors of the bucket's state."""
        return STATE_TENSORS + self.has_momentum

    @property
    def size(self) -> int:
        """The number of parameter elements."""
        return sum(math.prod(shape) for _, shape in self.parameters)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The elements of each tensor of the bucket's state."""
        return self.size, self.size, self.size - sum(self.matrix_sizes), *[self.size] * self.has_momentum

    @property
    def matrix_sizes(self) -> tuple[int, ...]:
        """The elements of each matrix that Muon updates, in the order of the flat tensors."""
        return tuple(math.prod(shape) for name, shape in self.parameters if name in self.orthogonal)

    def used_by(self, first: int, past_last: int) -> bool:
        """Whether one of the layers [first, past_last) uses the bucket."""
        return any(first <= layer < past_last for layer in self.layers)


def bucket_bytes(spec: BucketSpec, dtype: torch.dtype, *, shared: bool = False) -> int:
    """Size in bytes of the bucket's state, or of the part that all islands share (``shared``)."""
    return ((1 + spec.has_momentum) * spec.size if shared else sum(spec.sizes)) * dtype.itemsize


class Bucket:
    """A bucket's flat tensors, all 1-D, contiguous and of one dtype. All have spec.size elements, except the second moment,
    which leaves out the matrices that Muon updates, and ``updates``.

    - ``parameters`` and ``moments``, the state, are in the memory of ``home``.
    - ``momentum`` is the exchanges' momentum, if the run has one. It belongs to the state, is used once in a round, and is in
      the host's memory.
    - ``anchor``, with rounds, holds the parameters as of the last exchange. It is in the host's memory and no part of the
      state.
    - ``gradients`` are on ``device``, which computes them. Gradients are added in place: zero them by filling, never by
      replacing.
    - ``updates`` are Muon's updates of its matrices, one after the other, in UPDATES_DTYPE and on ``device``.
    - ``donors`` are the nodes that gave the state to this node, until somebody has found that the state is right.
    - ``is_aside``: the bucket was moved out of the way, where it is only read.

    Gradients, updates, and moments of zero, are allocated on first access, by the thread that makes the bucket or trains it. So
    a copy of the state that islands share takes no memory for them.
    """

    def __init__(
        self, spec: BucketSpec, device: torch.device, dtype: torch.dtype, home: torch.device | None = None
    ) -> None:
        self.spec = spec
        self.device = device
        self.donors: tuple[str, ...] = ()
        self.is_aside = False
        self.parameters = torch.zeros(spec.size, dtype=dtype, device=home or device)
        self._moments: tuple[torch.Tensor, torch.Tensor] | None = None
        self.momentum = torch.zeros_like(self.parameters, device=HOST) if spec.has_momentum else None
        self.anchor: torch.Tensor | None = None
        self._gradients: torch.Tensor | None = None
        self._updates: torch.Tensor | None = None

    @property
    def home(self) -> torch.device:
        return self.parameters.device

    @property
    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean of the gradients, and without Muon's matrices the mean of their squares."""
        if self._moments is None:
            _, means, squares, *_ = self.spec.sizes
            self._moments = self.parameters.new_zeros(means), self.parameters.new_zeros(squares)
        return self._moments

    @property
    def updates(self) -> torch.Tensor:
        if self._updates is None:
            self._updates = torch.zeros(sum(self.spec.matrix_sizes), dtype=UPDATES_DTYPE, device=self.device)
        return self._updates

    @property
    def gradients(self) -> torch.Tensor:
        if self._gradients is None:
            self._gradients = torch.zeros_like(self.parameters, device=self.device)
        return self._gradients

    def forget_gradients(self) -> None:
        """Frees the gradients, and Muon's updates. On the next access they are zero."""
        self._gradients = self._updates = None

    def forget_moments(self) -> None:
        for moment in self.moments:
            moment.zero_()

    @torch.no_grad()
    def rest(self, *, rounds: bool) -> None:
        """Call it when all islands have the same weights. With ``rounds`` the next exchange begins with these parameters."""
        if not rounds:
            self.anchor = None
        elif self.anchor is None:
            self.anchor = self.parameters.to(HOST, copy=True)
        else:
            self.anchor.copy_(self.parameters)

    def for_new_island(self, *, at_rest: bool) -> Bucket:
        """A bucket with the state that all islands share, and moments of zero. This bucket does not change."""
        other = copy.copy(self)
        other._moments = None
        if not at_rest:
            other.parameters = self.shared[0].to(self.home, copy=True)
        return other

    def placed(self, device: torch.device, home: torch.device) -> Bucket:
        """A bucket with its state in ``home``: this bucket if it is there already, otherwise a new one that shares all tensors
        that need not move."""
        if (self.device, self.home, self.is_aside) == (device, home, False):
            return self
        other = self._with_state(lambda tensor: tensor.to(home, copy=self.is_aside))
        other.device, other.is_aside = device, False
        if self.is_aside:
            other._map_momenta(lambda tensor: tensor.to(HOST, copy=True))
        return other

    def set_aside(self, away: Callable[[torch.Tensor], torch.Tensor]) -> Bucket:
        """A copy of this bucket, except its gradients, in the memory that ``away`` chooses."""
        other = self._with_state(away)
        other._map_momenta(away)
        other.is_aside = True
        return other

    def _with_state(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> Bucket:
        other = copy.copy(self)
        other._gradients = other._updates = None
        other.parameters = copied(self.parameters)
        if self._moments is not None:
            other._moments = copied(self._moments[0]), copied(self._moments[1])
        return other

    def _map_momenta(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Moves the tensors that exchanges need."""
        self.momentum = None if self.momentum is None else copied(self.momentum)
        self.anchor = None if self.anchor is None else copied(self.anchor)

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return self.parameters, *self.moments, *self._momenta

    @property
    def shared(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the state that all islands have the same, since the last exchange."""
        return self.parameters if self.anchor is None else self.anchor, *self._momenta

    @property
    def for_exchanges_bytes(self) -> int:
        """Bytes of the host's memory that only exchanges need."""
        return sum(tensor.nbytes for tensor in (self.anchor, *self._momenta) if tensor is not None)

    @property
    def _momenta(self) -> tuple[torch.Tensor, ...]:
        return () if self.momentum is None else (self.momentum,)

    def digests(self) -> tuple[bytes, bytes]:
        """Two digests: of the whole state, and of the state without AdamW's moments. Each is the BLAKE3 of the BLAKE3 of each
        tensor, computed on the tensor's device."""
        each = [*map(digest, self.state)]
        return blake3(b"".join(each)).digest(), blake3(b"".join((each[0], *each[STATE_TENSORS:]))).digest()

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """``flat`` ([spec.size]) cut into the bucket's parameters by name, sharing its memory."""
        return views(flat, self.spec.parameters)

    def matrices(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same for tensors like ``updates``, which have the elements of Muon's matrices alone."""
        return views(flat, [each for each in self.spec.parameters if each[0] in self.spec.orthogonal])

    def without_matrices(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same for tensors like the second moment, which lack the elements of Muon's matrices."""
        return views(flat, [each for each in self.spec.parameters if each[0] not in self.spec.orthogonal])

    def read(self, begin: int = 0, end: int | None = None, *, shared: bool = False) -> memoryview:
        """A copy, in the host's memory, of bytes [begin, end) of the state, by default of all. ``shared``: of the tensors of
        ``shared`` instead of ``state``. Little-endian."""
        tensors = self.shared if shared else self.state
        end = sum(tensor.nbytes for tensor in tensors) if end is None else end
        copied = torch.empty(end - begin, dtype=torch.uint8)
        for at, tensor in _placed(tensors):
            start, stop = max(begin, at), min(end, at + tensor.nbytes)
            if start < stop:
                part = tensor.detach().view(torch.uint8)[start - at : stop - at]
                copied[start - begin : stop - begin].copy_(part)
        return copied.numpy().data if len(copied) else memoryview(b"")

    def load(self, data: bytes | bytearray | memoryview, offset: int = 0, *, shared: bool = False) -> None:
        """Writes ``data`` into the state, starting at byte ``offset`` of the bytes of `read`. ``shared``: the data are the part
        that all islands share; they become the parameters.

        Raises:
            ValueError: ``data`` extends past the state.
        """
        source = memoryview(data).cast("B")
        total = bucket_bytes(self.spec, self.parameters.dtype, shared=shared)
        if offset < 0 or offset + len(source) > total:
            raise ValueError(
                f"bucket {self.spec.index} has {total} bytes of state, but bytes {offset} to {offset + len(source)} "
                "arrived: the sender has another model, or another precision"
            )
        for at, tensor in _placed((self.parameters, *self._momenta) if shared else self.state):
            begin, end = max(offset, at), min(offset + len(source), at + tensor.nbytes)
            for start in range(begin, end, LOADED_AT_ONCE):
                stop = min(start + LOADED_AT_ONCE, end)
                piece = source[start - offset : stop - offset]
                loaded = torch.frombuffer(bytearray(piece) if piece.readonly else piece, dtype=torch.uint8)
                tensor.view(torch.uint8)[start - at : stop - at].copy_(loaded)


def _placed(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Each tensor, and its first byte's place if they lie one after the other."""
    at = 0
    for tensor in tensors:
        yield at, tensor
        at += tensor.nbytes


def views(flat: torch.Tensor, parameters: Sequence[tuple[str, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    """``flat`` (1-D) cut into tensors of these names and shapes, one after the other, sharing its memory."""
    pieces = torch.split(flat, [math.prod(shape) for _, shape in parameters])
    return {name: piece.view(shape) for (name, shape), piece in zip(parameters, pieces, strict=True)}

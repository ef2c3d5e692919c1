"""What a node has done of one step, kept until the step is committed.

When a node is lost, the step goes on under the next generation (docs/architecture.md, A death). The others' work still
counts, and they can send their tensors again to the lost node's successors. So only the lost node's own
micro-batches are computed again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import RLock

import torch
from torch.autograd.graph import GradientEdge

from dtfm.kernels.codec import Encoded
from dtfm.kernels.transfer import to_host
from dtfm.node.model.placement import Placement
from dtfm.node.transport.receiver import Arrival
from dtfm.protos import control_pb2
from dtfm.protos.frame import Kind


@dataclass(slots=True)
class Progress:
    """One node's work on ``step`` for one stage, last continued in ``generation``.

    By micro-batch:
    activations, gradients: the stage's inputs and its outputs' gradients that have come and are not used yet, as they came.
    inputs, outputs: of micro-batches in flight, on the device; of outputs the graphs alone. A first stage has no inputs, a last
    stage no outputs.
    finished: micro-batches whose backward pass is done, or queued on the device, with their gradients added to the buckets'.
    losses: scalars on the device, on the last stage.
    sent: tensors that were sent to the neighbours or are for them, encoded in the host's memory.

    unreduced: by bucket, this node's sum of gradients (flat, on the CPU), from before the group's sum replaced it.
    room: the most bytes of ``sent`` and ``unreduced`` that may be kept. These two are for any thread, by the methods.
    """

    generation: int
    step: int
    room: int = sys.maxsize
    activations: dict[int, Arrival] = field(default_factory=dict)
    gradients: dict[int, Arrival] = field(default_factory=dict)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, GradientEdge | None] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    sent: dict[tuple[Kind, int], Future[Encoded]] = field(default_factory=dict)
    unreduced: dict[int, torch.Tensor] = field(default_factory=dict)
    _spoilt: bool = False
    _kept: dict[tuple[Kind, int] | int, int] = field(default_factory=dict)  # bytes of the entries of sent and unreduced
    _lock: RLock = field(default_factory=RLock)

    @property
    def reports_nothing(self) -> bool:
        """Whether a `report` would be empty: the coordinator takes the step for one that begins."""
        return not (self.activations or self.inputs or self.gradients or self.finished)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing of ``sent`` and ``unreduced`` was given up for lack of room."""
        return not self._spoilt

    def waiting(self, placement: Placement) -> Iterator[int]:
        """Micro-batches that can go forward."""
        for number in placement.micro_batches if placement.first else self.activations:
            if number not in self.outputs and number not in self.finished:
                yield number

    def has(self, kind: Kind, number: int) -> bool:
        """Whether a neighbour's tensor has come already, in this generation or an earlier one."""
        came = self.activations.keys() | self.inputs.keys() if kind is Kind.ACTIVATION else self.gradients
        return number in self.finished or number in came

    def keep(self, kind: Kind, number: int, sent: Future[Encoded], size: int) -> None:
        """Keeps a tensor of ``size`` encoded bytes in ``sent``, or replaces it there."""
        with self._lock:
            if self._make_room((kind, number), size):
                self.sent[kind, number] = sent

    def keep_unreduced(self, bucket: int, gradients: torch.Tensor) -> None:
        """To be called before the group's sum replaces ``gradients``."""
        if not self._make_room(bucket, gradients.nbytes):
            return
        copy = to_host(gradients)
        with self._lock:
            if not self._spoilt:
                self.unreduced[bucket] = copy

    def take_unreduced(self) -> dict[int, torch.Tensor]:
        """Each bucket's gradients from before they were replaced, for another attempt."""
        with self._lock:
            taken, self.unreduced = self.unreduced, {}
            self._give_back(taken)
            return taken

    def spoil(self) -> None:
        """This attempt may still succeed, but another one cannot build on it."""
        with self._lock:
            self._spoilt = True
            for mine in (self.sent, self.unreduced, self._kept):
                mine.clear()

    def discard(self) -> None:
        """Frees all its tensors, since no other attempt will build on them."""
        self.spoil()
        for mine in (self.activations, self.gradients, self.inputs, self.outputs):
            mine.clear()

    def fits(self, placement: Placement) -> bool:
        """Whether it can go on as ``placement``, of the same stage: no other node has been given micro-batches summed here."""
        return not self._spoilt and self.finished <= set(placement.micro_batches)

    def narrow(self, placement: Placement) -> None:
        """Drops the micro-batches that others compute now."""
        for mine in (self.activations, self.gradients, self.inputs, self.outputs):
            for number in mine.keys() - set(placement.micro_batches):
                del mine[number]
        with self._lock:
            others = [what for what in self.sent if what[1] not in placement.micro_batches]
            for what in others:
                del self.sent[what]
            self._give_back(others)

    def report(self, placement: Placement) -> control_pb2.Progress:
        """The message to the coordinator, which passes it on to the neighbours."""
        numbers = placement.micro_batches
        return control_pb2.Progress(
            activations=[] if placement.first else [n for n in numbers if self.has(Kind.ACTIVATION, n)],
            gradients=[] if placement.last else [n for n in numbers if self.has(Kind.GRADIENT, n)],
            finished=sorted(self.finished),
        )

    def _make_room(self, key: tuple[Kind, int] | int, size: int) -> bool:
        """Whether ``size`` bytes may be kept under ``key``, instead of the bytes there."""
        with self._lock:
            if self._spoilt:
                return False
            self._kept[key] = size
            if sum(self._kept.values()) > self.room:
                self.spoil()
                return False
            return True

    def _give_back(self, keys: Iterable[tuple[Kind, int] | int]) -> None:
        for key in keys:
            self._kept.pop(key, None)

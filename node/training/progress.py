"""What a node has done of one step, kept until the step is committed.

A step that is interrupted because a node was lost goes on under the next generation (DESIGN.md, How a step runs, 6): what the
survivors have computed still counts, and of what they sent they can send again what the lost node's successors need. So
only the lost node's own micro-batches are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from dtfm.kernels.codec import Encoded
from dtfm.node.host.trace import Beside, tell_beside
from dtfm.node.model.placement import Share
from dtfm.protos import control_pb2 as wire
from dtfm.protos.frame import Kind

MOST_KEPT_BYTES = 1 << 30
"""Beside the state, what was computed in one step is kept up to so many bytes; where it is more, an interrupted step begins
anew here."""

SPARE_SHARE = 0.25
"""So much of the memory that the state leaves free on a CPU may be kept. On a GPU's host nothing else needs it."""

AHEAD_SHARE = 0.125
"""So much of it may be taken by gradients of peers that are ahead, until this node's own are final too."""

SHORT = 1.5
"""Memory of so many times the state is little: what malloc keeps between pieces in use came to a tenth of the state."""

LEAST_AHEAD_BYTES = 16 << 20
"""From each peer, however little memory there is: what keeps a link busy while a piece of it is summed."""

Sent = Future[Encoded] | torch.Tensor
"""A tensor as it went to a neighbour; or, where it did not come to that, as it was computed."""


def room_beside(state_bytes: int, hardware: wire.Device) -> int:
    """How many bytes may be kept beside weights, gradients and moments of so many."""
    if hardware.kind != "cpu":
        return MOST_KEPT_BYTES
    return max(0, min(MOST_KEPT_BYTES, int(SPARE_SHARE * (hardware.memory_bytes - state_bytes))))


def is_short(state_bytes: int, hardware: wire.Device) -> bool:
    """Whether so little memory is left beside weights, gradients and moments of so many bytes that what is freed must go back."""
    return hardware.kind == "cpu" and hardware.memory_bytes < SHORT * state_bytes


def room_ahead(state_bytes: int, hardware: wire.Device, peers: int) -> int:
    """How many bytes of gradients may wait here from each of ``peers`` that reduce with this node."""
    free = hardware.memory_bytes - state_bytes if hardware.kind == "cpu" else MOST_KEPT_BYTES / AHEAD_SHARE
    return max(LEAST_AHEAD_BYTES, int(min(MOST_KEPT_BYTES, AHEAD_SHARE * free) / max(peers, 1)))


@dataclass(slots=True)
class Progress:
    """One node's work on ``step`` for one stage, last continued in ``generation``. By micro-batch:

    ``inputs``: the stage's inputs that have come and whose backward is not done (none on the first stage); ``outputs``: those
    of micro-batches in flight, with their graphs (on the last stage the losses); ``gradients``: of outputs, come and not
    used yet; ``finished``: gone backward, their gradients are added to the buckets'; ``losses``: means, on the last stage;
    ``sent``: what went to the neighbours.

    ``unreduced``: by bucket, this node's sum of gradients (flat, on the CPU), once the group's takes its place. ``room``: how
    many bytes of ``sent`` and ``unreduced`` may be kept.
    """

    generation: int
    step: int
    room: int = MOST_KEPT_BYTES
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    losses: dict[int, float] = field(default_factory=dict)
    sent: dict[tuple[Kind, int], Sent] = field(default_factory=dict)
    unreduced: dict[int, torch.Tensor] = field(default_factory=dict)
    _spoilt: bool = False
    _kept: int = 0

    def __post_init__(self) -> None:
        tell_beside(Beside.RETRY, 0)

    def waiting(self, share: Share) -> Iterator[int]:
        """Micro-batches that can go forward."""
        for number in share.micro_batches if share.first else self.inputs:
            if number not in self.outputs and number not in self.finished:
                yield number

    def has(self, kind: Kind, number: int) -> bool:
        """Whether a neighbour's tensor has come already, in this generation or an earlier one."""
        return number in self.finished or number in (self.inputs if kind is Kind.ACTIVATION else self.gradients)

    def keep(self, kind: Kind, number: int, sent: Sent, size: int) -> None:
        """``size`` in bytes; what is kept under the same name is replaced."""
        if (kind, number) in self.sent or self._make_room(size):
            self.sent[kind, number] = sent

    def keep_unreduced(self, bucket: int, gradients: torch.Tensor) -> None:
        """They are about to be replaced."""
        if self._make_room(gradients.nbytes):
            self.unreduced[bucket] = gradients.to("cpu", copy=True)

    def take_unreduced(self) -> dict[int, torch.Tensor]:
        """Each bucket's gradients as they were before they were replaced, for another attempt."""
        taken, self.unreduced = self.unreduced, {}
        self._make_room(-sum(gradients.nbytes for gradients in taken.values()))
        return taken

    def spoil(self) -> None:
        """This attempt may still succeed, but another one can not build on it."""
        self._spoilt, self._kept = True, 0
        self.sent.clear()
        self.unreduced.clear()
        tell_beside(Beside.RETRY, 0)

    def _make_room(self, size: int) -> bool:
        if self._spoilt:
            return False
        self.room -= size
        if self.room < 0:
            self.spoil()
            return False
        self._kept += size
        tell_beside(Beside.RETRY, self._kept)
        return True

    def fits(self, share: Share) -> bool:
        """Whether it can go on as ``share``, of the same stage: nothing that is added up here is for others to compute now."""
        return not self._spoilt and self.finished <= set(share.micro_batches)

    def narrow(self, share: Share) -> None:
        """Lets go of micro-batches that others compute now."""
        for mine in (self.inputs, self.outputs, self.gradients):
            for number in mine.keys() - set(share.micro_batches):
                del mine[number]
        self.sent = {what: sent for what, sent in self.sent.items() if what[1] in share.micro_batches}

    def told(self, share: Share) -> wire.Progress:
        """What the coordinator and, through it, the neighbours learn of it."""
        numbers = share.micro_batches
        return wire.Progress(
            activations=[] if share.first else [n for n in numbers if self.has(Kind.ACTIVATION, n)],
            gradients=[] if share.last else [n for n in numbers if self.has(Kind.GRADIENT, n)],
            finished=sorted(self.finished),
        )

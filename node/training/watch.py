"""What neighbouring stages pass on, watched where it comes in, among strangers (trust.mode = "open").

Of each tensor a few numbers are kept: its size, and of activations the direction in which their mean over positions points.
Activations of one layer share a direction, whoever computed them; gradients do not, and their sizes move a lot while a model
learns, so that the bounds are wide. What is unusual proves nothing, and nobody loses anything by it: it has the work done again.
This finds zeros, noise, flipped activations and tensors of quite another size. It does not find a bias of a few per cent, as
audits do (core/trust on the coordinator's side).

All averages are at this stage's borders, so that they hold as long as the stage does, however others are cut.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from dtfm.node.training.usual import MOST_DEVIATIONS, Unusual, Usual
from dtfm.protos.frame import Kind

DEVIATIONS = 8.0
"""What is nearer than this is usual."""

FACTOR = 7.0
"""Sizes that differ by less than this factor are usual as well."""

TURN = 0.5
"""So are directions whose cosine is less than this below the usual one, ..."""

UNRELATED = 0.25
"""... unless it is below this."""

DIRECTION_SHARE = 0.1
UNUSUAL_SHARE = 0.02
"""The share of the newest tensor in the average of directions, and that of an unusual one."""


POSITIONS = 512
"""So many positions of a tensor go into its mean, at equal distances from a place that nobody can foresee."""


def measured(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Float32 [1] of the root mean square of ``tensor``, or [1 + width] with the sum over positions, which are of so many
    elements each; 0: no sum. On the tensor's device, which nobody waits for."""
    flat = tensor.detach().reshape(-1)
    size: torch.Tensor = torch.linalg.vector_norm(flat).float() / math.sqrt(max(1, flat.numel()))
    if not width:
        return size.view(1)
    positions = flat.view(-1, width)
    apart = max(1, len(positions) // POSITIONS)
    taken = positions[random.randrange(apart) :: apart].float()
    # A product, as a sum over the first dimension is slow on a CPU.
    total: torch.Tensor = taken.new_ones(1, len(taken)) @ taken
    return torch.cat((size.view(1), total.view(-1)))


@dataclass(frozen=True, slots=True)
class Look:
    """What is kept of a tensor. ``direction``: float64 [hidden] of length 1, or empty."""

    kind: Kind
    source: str
    index: int
    size: float
    direction: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Sender:
    """What is usual of one sender's tensors of one kind: the logarithm of their size, the direction, and its cosines."""

    size: Usual = field(default_factory=lambda: Usual(least=0.25, most=0.6))
    cosine: Usual = field(default_factory=lambda: Usual(least=0.05, most=0.15))
    direction: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def cosine_of(self, look: Look) -> float | None:
        """None: there is nothing to compare."""
        length = float(np.linalg.norm(self.direction))
        if not length or look.direction.shape != self.direction.shape:
            return None
        return float(look.direction @ self.direction) / length

    def deviations(self, look: Look) -> float:
        """How unusual the tensor would be of this sender; 0: it is usual, or the sender is not known yet."""
        if not self.size.is_known:
            return 0.0
        size, far = math.log(look.size), 0.0
        if abs(size - self.size.mean) > math.log(FACTOR):
            far = self.size.deviations(size)
        if (cosine := self.cosine_of(look)) is not None and self.cosine.mean - cosine > 0:
            off = self.cosine.deviations(cosine)
            if cosine < UNRELATED:
                far = max(far, off, DEVIATIONS)
            elif self.cosine.mean - cosine > TURN:
                far = max(far, off)
        return far if far >= DEVIATIONS else 0.0

    def moved(self, look: Look, *, usual: bool) -> _Sender:
        cosine = self.cosine_of(look)
        share = DIRECTION_SHARE if usual else UNUSUAL_SHARE
        direction = self.direction + share * (look.direction - self.direction) if cosine is not None else look.direction
        return replace(
            self,
            size=self.size.moved(math.log(look.size)),
            cosine=self.cosine.moved(cosine) if cosine is not None else self.cosine,
            direction=direction,
        )


class Watch:
    """For one thread. Tensors are compared with what was usual of their sender, and of the other senders of their kind, before
    this step. The numbers of a step stay on the device until its end."""

    def __init__(self, senders: Collection[str], earlier: Watch | None = None) -> None:
        """``earlier``: of an earlier generation of the same stage. Only ``senders`` are remembered."""
        before = earlier._senders if earlier is not None else {}
        self._senders: dict[tuple[Kind, str], _Sender] = {key: its for key, its in before.items() if key[1] in senders}
        self.begin()

    def begin(self) -> None:
        """A step begins, perhaps once more: the last one was not committed."""
        self._waiting: list[tuple[Kind, str, int, torch.Tensor]] = []
        self._looks: list[tuple[Look, float]] = []

    def took(self, kind: Kind, source: str, index: int, tensor: torch.Tensor) -> None:
        """A tensor is about to be used, as [..., hidden]."""
        width = tensor.shape[-1] if kind is Kind.ACTIVATION and tensor.dim() > 1 else 0
        self._waiting.append((kind, source, index, measured(tensor, width)))

    def unusual(self) -> list[Unusual]:
        """What of this step is, the most unusual first. Waits for the device."""
        self._read()
        found = [Unusual(look.source, look.kind, look.index, far) for look, far in self._looks if far]
        return sorted(found, key=lambda each: -each.deviations)

    def commit(self) -> None:
        """The step is committed: what was seen in it is remembered."""
        self._read()
        for look, far in self._looks:
            if look.size > 0 and math.isfinite(look.size):
                key = (look.kind, look.source)
                self._senders[key] = self._senders.get(key, _Sender()).moved(look, usual=not far)
        self.begin()

    def _read(self) -> None:
        waiting, self._waiting = self._waiting, []
        for width in {numbers.numel() for *_, numbers in waiting}:
            alike = [each for each in waiting if each[3].numel() == width]
            rows = torch.stack([numbers for *_, numbers in alike]).cpu().numpy().astype(np.float64)
            looks = [_look(kind, source, index, row) for (kind, source, index, _), row in zip(alike, rows, strict=True)]
            self._looks += [(look, self._deviations(look)) for look in looks]

    def _deviations(self, look: Look) -> float:
        """How unusual it is of its own sender, or of that other sender which it is most like: the larger of the two."""
        if not (look.size > 0 and math.isfinite(look.size)):
            return MOST_DEVIATIONS
        others = [
            its.deviations(look)
            for (kind, source), its in self._senders.items()
            if kind is look.kind and source != look.source and its.size.is_known
        ]
        own = self._senders.get((look.kind, look.source), _Sender()).deviations(look)
        return max(own, min(others, default=0.0))


def _look(kind: Kind, source: str, index: int, row: NDArray[np.float64]) -> Look:
    total = row[1:]
    with np.errstate(all="ignore"):
        length = float(np.linalg.norm(total))
    direction = total / length if length > 0 and math.isfinite(length) else np.zeros(0)
    return Look(kind, source, index, float(row[0]), direction)


def some(found: Sequence[Unusual], most: int) -> list[Unusual]:
    """At most so many, the most unusual ones, and of each sender one before a second of any."""
    ranks: dict[str, int] = {}
    order = []
    for each in sorted(found, key=lambda each: -each.deviations):
        ranks[each.node] = ranks.get(each.node, -1) + 1
        order.append((ranks[each.node], each))
    return [each for _, each in sorted(order, key=lambda pair: pair[0])][:most]

"""What replicas add to each other's gradients, watched by who adds it up, among strangers (trust.mode = "open").

The gradients of honest replicas point roughly the same way, at least on average over some steps: they come from samples of the
same data. Of each addend the cosine to the sum of the others' is taken, and averaged by member. Who turns its sign is on the
other side, and who adds noise on none. A member is compared with the others of the same steps, since all cosines fall while a
model learns. What is unusual proves nothing, and nobody loses anything by it: it has the work done again.

This sees directions only; contribution_bound.py holds sizes within bounds.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dtfm.node.model.placement import Group
from dtfm.node.training.contribution_bound import Clipped
from dtfm.node.training.usual import KNOWN_AFTER, MOST_DEVIATIONS, Unusual
from dtfm.protos.frame import Kind

SAMPLE = 1 << 14
"""Elements of a piece that are looked at, side by side, from a place that nobody can foresee."""

NEW_SHARE = 0.2
"""The share of the newest step in the averages."""

KNOWN_AFTER_STEPS = 4

BEHIND = 0.2
"""A member is unusual if its average is so far below the least of the others, ..."""

AGAINST = -0.25
"""... and below this."""

DEVIATION = 0.05
"""What counts as one deviation, in cosines."""


@dataclass(frozen=True, slots=True)
class Leaning:
    """A member's cosines on average, over so many steps and pieces."""

    cosine: float = 0.0
    steps: int = 0
    pieces: int = 0

    @property
    def is_known(self) -> bool:
        return self.steps >= KNOWN_AFTER_STEPS and self.pieces >= KNOWN_AFTER

    def moved(self, cosines: Sequence[float]) -> Leaning:
        """After another step with these cosines, at least one."""
        share = max(NEW_SHARE, 1 / (self.steps + 1))
        cosine = self.cosine + share * (statistics.fmean(cosines) - self.cosine)
        return Leaning(cosine, self.steps + 1, self.pieces + len(cosines))


def cosines(products: NDArray[np.float64]) -> list[float | None]:
    """Of each addend, its cosine to the sum of the others; None: there is none. ``products`` [members, members] are their inner
    products."""
    with np.errstate(all="ignore"):
        rows, own = products.sum(axis=1), products.diagonal()
        size = own * (rows.sum() - 2 * rows + own)  # what rounding leaves of nothing may be below 0
        found = (rows - own) / np.sqrt(size)
    return [min(max(cosine, -1.0), 1.0) if math.isfinite(cosine) else None for cosine in found.tolist()]


def who_leans_away(leanings: Mapping[str, Leaning], own: str) -> dict[str, float]:
    """The members whose averages are unusual beside the others', and by how many deviations. ``own``: this node, which does not
    doubt itself."""
    known = {member: its.cosine for member, its in leanings.items() if its.is_known}
    found = {}
    for member, cosine in known.items():
        least = min((other for name, other in known.items() if name != member), default=cosine)
        # Of two, both have the same cosine to each other: what is honest varies more.
        behind = least - cosine if len(known) > 2 else -cosine / 2
        if member != own and cosine < AGAINST and behind > BEHIND:
            found[member] = min(behind / DEVIATION, MOST_DEVIATIONS)
    return found


class Alignment:
    """For one thread."""

    def __init__(self, members: Collection[str] = (), earlier: Alignment | None = None) -> None:
        """``earlier``: of an earlier generation of the same stage. Only ``members`` are remembered."""
        before = earlier._leanings if earlier is not None else {}
        self._leanings: dict[str, Leaning] = {member: its for member, its in before.items() if member in members}
        self._own = ""
        self.begin()

    def begin(self) -> None:
        """A step is reduced, perhaps once more: the last one was not committed."""
        self._seen: dict[str, list[tuple[float, int]]] = {}  # by member: cosines and buckets
        self._nothing: dict[str, int] = {}  # a bucket to which this member alone added nothing

    def look(self, bucket: int, group: Group, own: int, addends: Sequence[torch.Tensor]) -> None:
        """At the members' addends to one piece of ``bucket`` (1-D), in the group's order; this node's has the number ``own``.
        Those of a bucket that several stages share are not alike, and not looked at."""
        if len(set(group.stages)) > 1 or not all(group.loads):
            return
        size = addends[0].numel()
        start = random.randrange(max(1, size - SAMPLE + 1))
        rows = torch.stack([addend[start : start + SAMPLE] for addend in addends]).double()
        self._own = group.members[own]
        products = (rows @ rows.T).cpu().numpy()
        for member, cosine, product in zip(group.members, cosines(products), products.diagonal(), strict=True):
            if product == 0 and np.count_nonzero(products.diagonal()) == len(products) - 1:
                self._nothing[member] = bucket
            if cosine is not None:
                self._seen.setdefault(member, []).append((cosine, bucket))

    def unusual(self, clipped: Mapping[str, Clipped]) -> list[Unusual]:
        """Who added what is unusual in this step, with the bucket in which it is most so. So is what was ``clipped``, and nothing
        at all where all others added something."""
        found = [
            Unusual(member, Kind.REDUCE, its.bucket, min(its.worst, MOST_DEVIATIONS))
            for member, its in sorted(clipped.items())
        ]
        found += [
            Unusual(member, Kind.REDUCE, bucket, MOST_DEVIATIONS)
            for member, bucket in sorted(self._nothing.items())
            if member not in (*self._seen, *clipped, self._own)
        ]
        away = who_leans_away(self._moved(), self._own)
        return found + [
            Unusual(member, Kind.REDUCE, min(self._seen[member])[1], far)
            for member, far in sorted(away.items())
            if member in self._seen and member not in clipped
        ]

    def commit(self) -> None:
        """The step is committed: what was seen in it is remembered."""
        self._leanings = self._moved()
        self.begin()

    def _moved(self) -> dict[str, Leaning]:
        moved = {
            member: self._leanings.get(member, Leaning()).moved([cosine for cosine, _ in seen])
            for member, seen in self._seen.items()
        }
        return {**self._leanings, **moved}

"""How much one replica can add to its group's gradients, where the members are strangers (trust.mode = "open").

An addend is compared with its expected size: with the addends of the other replicas of its stage, and with the usual ones of
earlier steps. An honest addend may be several times as large, but not step after step. So each member has an allowance, and
large addends use it up: over some twenty steps a member adds at most AVERAGE times the expected size. Larger addends are
clipped, and an addend that is not finite is left out. So no replica can drown the others. This does not find a
liar who keeps to the norm, nor does it hold back a member that sums its shard wrongly. Bounding norms is the simplest of the
robust aggregations (Karimireddy et al., arXiv 2012.10333).

The micro-batches of one replica add up to something between the square root of their number and their number: the first where
they are mostly noise, the second where they agree. The comparison allows for both, so that a replica with another share of the
step is not mistaken for a liar.

The pieces of a bucket are not alike. In tied embeddings, the rows of frequent tokens have large gradients, and the first stage
adds nothing to the rows of tokens that do not occur. So a usual size in one place says nothing about another place. If a
group's shards are new, an addend is compared with others of its own step, and with the usual size for the whole bucket. The
others may be small by chance: a rare token may occur in one replica's text alone. The largest of these sizes decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dtfm.node.model.placement import Group
from dtfm.protos.control_pb2 import StepReady

MOST = 10.0
"""An addend may be this many times as large as expected at the most. Honest ones of single samples were seen to reach 6."""

AVERAGE = 1.5
"""It may be this many times as large on average."""

NEWCOMER = 1.0
"""The average with which a member begins."""

NEW_SHARE = 0.05
"""The share of the newest step in the averages."""


@dataclass(frozen=True, slots=True)
class Addend:
    """What a replica of ``stage`` adds to a piece: ``size`` is the root mean square of its elements, ``load`` the number of
    micro-batches that it comes from."""

    stage: int
    load: float
    size: float

    @property
    def counts(self) -> bool:
        """Whether others can be compared with it."""
        return self.load > 0 and math.isfinite(self.size)

    def at(self, load: float) -> float:
        """The largest size to be expected of ``load`` micro-batches like these."""
        ratio = load / self.load
        return self.size * max(ratio, math.sqrt(ratio))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece lies: its elements, of a flat ``bucket``."""

    bucket: int
    start: int
    stop: int


Clipped = StepReady.Clipped
"""A member's addends that were clipped, as the vote says it."""


def expected(
    addends: Sequence[Addend], rank: int, own: int, usual_here: Mapping[int, Addend], usual: Mapping[int, Addend]
) -> float | None:
    """The expected size of the addend with the number ``rank``; None if nothing is known: others may be zero by chance, if
    a part of the vocabulary does not occur.

    This node believes its ``own`` addend. Of the others' it takes the median, the lower one of two. ``usual_here``: by stage,
    the addends to this piece in earlier steps; ``usual``: the addends to any piece of the bucket.
    """
    judged = addends[rank]
    if judged.load == 0:
        return 0.0
    others = [a.at(judged.load) for i, a in enumerate(addends) if i != rank and a.stage == judged.stage and a.counts]
    known = [statistics.median_low(others)] if others else []
    if own != rank and addends[own].stage == judged.stage and addends[own].counts:
        known.append(addends[own].at(judged.load))
    if judged.stage in usual_here:
        known.append(usual_here[judged.stage].at(judged.load))
    if known and judged.stage in usual:
        known.append(usual[judged.stage].at(judged.load))
    return max(known, default=0.0) or None


def allowance(average: float) -> float:
    """How many times the expected size an addend may have, of a member whose addends were this large on ``average``."""
    return min(MOST, (AVERAGE - (1 - NEW_SHARE) * average) / NEW_SHARE)


def moved(average: float, newest: float) -> float:
    """The average after another step."""
    return (1 - NEW_SHARE) * average + NEW_SHARE * newest


class ContributionBound:
    """Holds other members' addends within the bound, and remembers the usual sizes. For one thread."""

    def __init__(self, earlier: ContributionBound | None = None) -> None:
        """``earlier``: of another stage of this node. How members used their allowances is remembered."""
        self._usual: dict[Place | int, dict[int, Addend]] = {}  # by place, or bucket, and stage
        # By bucket and member.
        self._averages: dict[tuple[int, str], float] = dict(earlier._averages) if earlier else {}
        self.begin()

    def begin(self) -> None:
        """A step is reduced, perhaps once more: the last one was not committed."""
        self._seen: dict[Place | int, dict[int, list[Addend]]] = {}  # as above
        self._times: dict[tuple[int, str], list[float]] = {}
        self._clipped: dict[str, Clipped] = {}

    @property
    def clipped(self) -> Mapping[str, Clipped]:
        """By member, the addends that were clipped in the present step."""
        return self._clipped

    def hold(self, place: Place, group: Group, own: int, pieces: Sequence[torch.Tensor]) -> None:
        """Clips ``pieces`` in place: the members' addends at ``place`` (1-D), in the group's order. This node's piece
        has the number ``own``."""
        here, usual = self._usual.get(place, {}), self._usual.get(place.bucket, {})
        sizes = torch.stack([torch.linalg.vector_norm(piece) / math.sqrt(piece.numel()) for piece in pieces]).tolist()
        addends = [Addend(*each) for each in zip(group.stages, group.loads, sizes, strict=True)]
        for rank, (member, piece) in enumerate(zip(group.members, pieces, strict=True)):
            addend, size = addends[rank], expected(addends, rank, own, here, usual)
            if rank != own:
                kept = self._clip(place.bucket, member, piece, addend, size)
                addend = Addend(addend.stage, addend.load, kept)
            believed = rank == own or group.stages[own] != addend.stage or not addends[own].counts
            if believed and addend.counts:
                for where in (place, place.bucket):
                    self._seen.setdefault(where, {}).setdefault(addend.stage, []).append(addend)

    def commit(self) -> None:
        """The step is committed: its sizes are remembered."""
        for key, times in self._times.items():
            self._averages[key] = moved(self._averages.get(key, NEWCOMER), statistics.fmean(times))
        self._usual = {where: self._moved(where, seen) for where, seen in self._seen.items()}
        self.begin()

    def _moved(self, where: Place | int, seen: Mapping[int, Sequence[Addend]]) -> dict[int, Addend]:
        """The usual sizes there, by stage, once these addends belong to them."""
        usual = dict(self._usual.get(where, {}))
        for stage, addends in seen.items():
            load = max(addend.load for addend in addends)
            size = math.sqrt(statistics.fmean(addend.at(load) ** 2 for addend in addends))
            if (before := usual.get(stage)) is not None:
                size = moved(before.size * math.sqrt(load / before.load), size)  # the same there and back
            usual[stage] = Addend(stage, load, size)
        return usual

    def _clip(self, bucket: int, member: str, piece: torch.Tensor, addend: Addend, size: float | None) -> float:
        """Returns the size of the remaining addend."""
        if addend.size == 0 or (size is None and math.isfinite(addend.size)):
            return addend.size
        allowed = allowance(self._averages.get((bucket, member), NEWCOMER)) * (size or 0.0)
        if not addend.size <= allowed:
            times = addend.size / allowed if allowed and math.isfinite(addend.size) else math.inf
            clipped = self._clipped.setdefault(member, Clipped(node=member))
            clipped.pieces, clipped.worst = clipped.pieces + 1, max(clipped.worst, times)
            if times == math.inf:
                piece.zero_()
                return 0.0
            piece.mul_(1 / times)
        if size:
            self._times.setdefault((bucket, member), []).append(min(addend.size, allowed) / size)
        return min(addend.size, allowed)

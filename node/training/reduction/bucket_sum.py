"""One bucket of a reduction: which pieces lack their sum, what has come for them, and how a piece is added up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from dtfm.node.host.cuda_streams import Beside
from dtfm.node.model.placement import Group, pieces
from dtfm.node.training.reduction.contribution_bound import ContributionBound, Place
from dtfm.node.training.reduction.matrix_updates import MatrixUpdates
from dtfm.node.training.step.pipeline import NonFinite, is_finite
from dtfm.node.transport.receiver import Arrival


@dataclass(slots=True)
class BucketSum:
    """The state of one bucket's reduction in a step."""

    index: int
    gradients: torch.Tensor
    group: Group
    rank: int
    """Of this node, in the group."""
    sparse: bool
    """All members add up each piece, from its senders (`Group.senders`)."""
    updates: MatrixUpdates | None
    """Of its matrices, if Muon updates some in this step."""
    final: Beside | None = None
    """Set once this node's own gradients are final; all is done in that context."""
    addends: dict[int, dict[int, Arrival]] = field(default_factory=dict)
    """Other members' gradients of the pieces that this node adds up, by piece and rank."""
    missing: set[int] = field(init=False)
    """The pieces without their sum."""

    @property
    def members(self) -> tuple[str, ...]:
        return self.group.members

    def __post_init__(self) -> None:
        ranges = pieces(self.gradients.numel(), len(self.members))
        self.missing = {number for number, (start, stop) in enumerate(ranges) if stop > start}

    @property
    def is_complete(self) -> bool:
        return self.final is not None and not self.missing and not (self.updates and self.updates.lacking)

    def range(self, number: int) -> tuple[int, int]:
        """The half-open range of a piece's elements."""
        return self.group.piece(self.gradients.numel(), number)

    def piece(self, number: int) -> torch.Tensor:
        start, stop = self.range(number)
        return self.gradients[start:stop]

    def beside(self) -> AbstractContextManager[object]:
        return (self.final or nullcontext)()

    def summable(self, piece: int) -> bool:
        others = len(self.added(piece) - {self.rank})
        return self.final is not None and piece in self.missing and len(self.addends.get(piece, ())) == others

    def added(self, piece: int) -> Set[int]:
        """The ranks whose gradients of a piece are added up."""
        return set(self.group.senders(piece)) if self.sparse else set(range(len(self.members)))

    def add_up(self, number: int, bound: ContributionBound | None) -> None:
        """Replaces a piece by the sum of its addends, held within the ``bound``. Addends before this node's in the
        group's order are added up in the memory of the first addend."""
        own, arrivals, ranks = self.piece(number), self.addends.get(number, {}), sorted(self.added(number))
        addends: Iterable[torch.Tensor] = (
            own if rank == self.rank else arrivals[rank].decoded(own.device) for rank in ranks
        )
        if bound is None:
            addends = self._finite(number, ranks, addends)
        if bound is not None:  # it compares them, so that all are decoded at once
            addends = list(addends)
            bound.hold(Place(self.index, *self.range(number)), self.group, self.rank, addends)
        total: torch.Tensor | None = None
        for rank, addend in zip(ranks, addends, strict=True):
            if total is None:
                total = addend
            elif rank == self.rank:
                total = own.add_(total)
            else:
                total = total.add_(addend)
        if total is not None and self.rank not in ranks:
            own.copy_(total)

    def _finite(self, number: int, ranks: Sequence[int], addends: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The addends, unchanged. Raises NonFinite for one that is not finite."""
        for rank, addend in zip(ranks, addends, strict=True):
            if rank != self.rank and not is_finite(addend):
                source = self.members[rank]
                raise NonFinite(f"bucket {self.index}, piece {number} from {source} is NaN or infinite", source)
            yield addend

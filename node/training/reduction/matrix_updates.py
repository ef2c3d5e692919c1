"""Muon's updates of a bucket's matrices in a replica group. One member owns each matrix whole: once it has the sums of the
gradients it finds the matrix's update, and sends it to the others (node/model/optimizer/muon.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from dtfm.node.host.work import WORK
from dtfm.node.model.bucket import Bucket
from dtfm.node.model.optimizer.muon import orthogonalise
from dtfm.node.model.placement import Placement, matrix_pieces
from dtfm.node.training.step.pipeline import NonFinite, is_finite
from dtfm.node.transport.receiver import Arrival


class MatrixUpdates:
    """The updates of ``bucket`` in one step, of a group with this number of ``members``, of which this node has the ``rank``.
    ``lacking`` are the pieces that others have still to send."""

    def __init__(self, bucket: Bucket, members: int, rank: int) -> None:
        self._bucket = bucket
        self._pieces = matrix_pieces(bucket.spec.matrix_sizes, members)
        self.lacking = {number for number, piece in enumerate(self._pieces) if piece.owner != rank}
        self.own = sorted({piece.matrix for piece in self._pieces if piece.owner == rank})
        """The numbers of the matrices that this node owns."""

    def find(self, matrix: int, gradients: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Finds the update of a matrix by the flat sums of the ``gradients``. The pieces to send, by number."""
        updates = self._bucket.updates
        orthogonalise(self._bucket, gradients, [*self._bucket.matrices(updates)][matrix])
        WORK.did()
        for number, piece in enumerate(self._pieces):
            if piece.matrix == matrix:
                yield number, updates[piece.start : piece.stop]

    def take(self, arrival: Arrival) -> None:
        """A piece that its owner has sent. Raises NonFinite."""
        number, update = arrival.header.part, arrival.decoded(self._bucket.device)
        if not is_finite(update):
            problem = f"an update of bucket {self._bucket.spec.index} from {arrival.source} is NaN or infinite"
            raise NonFinite(problem, arrival.source)
        piece = self._pieces[number]
        self._bucket.updates[piece.start : piece.stop].copy_(update)
        self.lacking.discard(number)


def orthogonalise_alone(buckets: Mapping[int, Bucket], placement: Placement) -> None:
    """Finds the updates of Muon's matrices in buckets that nobody reduces with this node."""
    for index, bucket in buckets.items():
        for name in bucket.spec.orthogonal if len(placement.groups[index].members) == 1 else ():
            orthogonalise(bucket, bucket.gradients, name)
            WORK.did()

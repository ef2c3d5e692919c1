"""What a node has sent in the step that it votes on, kept for audits of its work, and of its neighbours' work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dtfm.kernels.codec import Codec, Encoded, encode
from dtfm.node.model.placement import Placement
from dtfm.node.training.step.progress import Progress
from dtfm.node.transport.frame_validation import TensorSizes
from dtfm.node.transport.kept import Tensor
from dtfm.node.transport.sender import What
from dtfm.protos.frame import Kind
from dtfm.protos.peer_pb2 import KeptRequest


@dataclass(frozen=True, slots=True)
class KeptWork:
    """The tensors that ``progress`` sent, for audits: its gradients to replicas with the codec ``reduction``, and its
    ``changes``."""

    placement: Placement
    progress: Progress
    sizes: TensorSizes
    reduction: Codec
    changes: Mapping[tuple[int, int], Encoded]

    def find(self, request: KeptRequest) -> Tensor:
        """A tensor in the bytes that were sent; nobody writes to its memory again. From any thread. Raises LookupError."""
        match request.kind:
            case Kind.ACTIVATION | Kind.GRADIENT if not request.part:
                encoded = self._encoded(Kind(request.kind), request.index)
                elements = self.sizes.output if request.kind == Kind.ACTIVATION else self.sizes.input
                dtype = self.sizes.dtype
            case Kind.REDUCE:
                encoded, elements = self._addend(request.index, request.part)
                dtype = self.sizes.reduced
            case _:
                raise LookupError(f"NOT_KEPT: tensors of kind {request.kind} are not kept")
        at = (request.generation, request.step, request.index, request.part)
        return What(Kind(request.kind), *at, elements, dtype).header(encoded), encoded.data

    def _encoded(self, kind: Kind, number: int) -> Encoded:
        sent = self.progress.sent.get((kind, number))
        if sent is None or not sent.done():
            raise LookupError(f"NOT_KEPT: {kind.name} {number} is not kept here")
        return sent.result()

    def _addend(self, bucket: int, part: int) -> tuple[Encoded, int]:
        """(this node's own gradients of a piece, or its changes, in the bytes that it sent; elements)."""
        if (change := self.changes.get((bucket, part))) is not None:
            start, stop = self.placement.exchange_groups[bucket].piece(self.sizes.buckets[bucket], part)
            return change, stop - start
        if (mine := self.progress.unreduced.get(bucket)) is not None:
            group = self.placement.groups[bucket]
            start, stop = group.piece(mine.numel(), part)
            if stop > start and group.owner(part) != self.placement.node:
                return encode(self.reduction, mine[start:stop]), stop - start
        raise LookupError(f"NOT_KEPT: piece {part} of bucket {bucket} was not sent from here, or is not kept")

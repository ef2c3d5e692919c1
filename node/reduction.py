"""The replica group: gradients of one bucket become their sum on every node that holds it.

As in the paper (arXiv 2206.01288, section 3.2) each member owns a shard: the others send it their gradients of that shard,
it adds them up and sends the sum to all. Adding happens in the group's order whatever the order of arrival, and every
member takes the owner's bytes, so that all hold the same bits.

Under a codec that leaves elements out, what is left out of a message is added to the next step's message for the same shard:
of shares by each member, of sums by the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from dtfm.kernels.codec import DTYPES, Codec, Encoded, decode, encode
from dtfm.kernels.feedback import encode_with_feedback
from dtfm.node.admission import shards
from dtfm.node.inbox import Arrival
from dtfm.node.mailbox import Mailbox
from dtfm.node.share import Group
from dtfm.node.trace import Activity, span
from dtfm.protos.frame import Kind

#: send(kind, destination, bucket, shard, encoded gradients of that shard or their sum, its elements, their dtype)
Send = Callable[[Kind, str, int, int, Encoded, int, torch.dtype], None]

#: By bucket and shard, what a node's messages have left out so far: 1-D float32 of the shard's elements. No more than one
#: message a step concerns a shard: its sum from the owner, a share from any other.
Residuals = Mapping[tuple[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Final:
    """This node adds nothing more to the gradients of ``bucket`` in this step."""

    bucket: int


@dataclass(slots=True)
class _Bucket:
    """How far the reduction of one bucket is. ``shares``: by member, their gradients of the shard that this node owns."""

    index: int
    gradients: torch.Tensor
    members: tuple[str, ...]
    rank: int
    final: bool = False
    shares: dict[int, torch.Tensor] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)

    def range_of(self, shard: int) -> tuple[int, int]:
        return shards(self.gradients.numel(), len(self.members))[shard]

    def shard(self, shard: int) -> torch.Tensor:
        start, stop = self.range_of(shard)
        return self.gradients[start:stop]


def reduce_gradients(
    node: str,
    step: int,
    gradients: Mapping[int, torch.Tensor],
    groups: Mapping[int, Group],
    mailbox: Mailbox[int, Arrival | Final],
    send: Send,
    codec: Codec,
    carried: Residuals,
    keep: Callable[[int, torch.Tensor], None],
) -> Residuals:
    """Replaces ``gradients`` (flat tensors by bucket) by their sums over the buckets' groups; before, each is
    given to ``keep``, so that the reduction can be done again with others.

    Runs in a thread of its own, beside backward: reads ``step`` from ``mailbox``, where the pipeline says Final for each
    bucket and the inbox puts what the peers send. Everything goes out under ``codec``; ``carried`` is what it has left out in
    earlier steps. Returns, when every bucket is complete, what is to be carried instead once the step is committed. Raises
    Closed.
    """
    left_out: dict[tuple[int, int], torch.Tensor] = {}

    def encoded(bucket: _Bucket, shard: int, tensor: torch.Tensor) -> Encoded:
        with span(Activity.ENCODE, step, bucket.index):
            if not codec.sparse:
                return encode(codec, tensor)
            at = bucket.index, shard
            corrected = encode_with_feedback(codec, tensor, carried.get(at))
            left_out[at] = corrected.residual
            return corrected.encoded

    buckets = {}
    for index, flat in gradients.items():
        members = groups[index].members
        if len(members) > 1:
            owned = {i for i, (start, stop) in enumerate(shards(flat.numel(), len(members))) if stop > start}
            buckets[index] = _Bucket(index, flat, members, members.index(node), missing=owned)
    while any(b.missing or not b.final for b in buckets.values()):
        item = mailbox.get(step)
        index = item.bucket if isinstance(item, Final) else item.header.index
        bucket = buckets.get(index)
        if bucket is None:  # held by this node alone
            continue
        if isinstance(item, Final):
            bucket.final = True
            keep(index, bucket.gradients)
            for rank, member in enumerate(bucket.members):
                if rank != bucket.rank and rank in bucket.missing:
                    share = bucket.shard(rank)
                    message = encoded(bucket, rank, share)
                    send(Kind.REDUCE, member, index, rank, message, share.numel(), share.dtype)
        else:
            with span(Activity.DECODE, step, index):
                _receive(bucket, item)
        if bucket.final and bucket.rank in bucket.missing and len(bucket.shares) == len(bucket.members) - 1:
            own = bucket.shard(bucket.rank)
            with span(Activity.REDUCE, step, index):
                message = encoded(bucket, bucket.rank, _sum(bucket))
                # The owner, too, goes on with what the others get.
                own.copy_(decode(message.codec, message.data, own.numel(), own.dtype, own.device))
            bucket.missing.discard(bucket.rank)
            for rank, member in enumerate(bucket.members):
                if rank != bucket.rank:
                    send(Kind.GATHER, member, index, bucket.rank, message, own.numel(), own.dtype)
    return left_out


def _receive(bucket: _Bucket, arrival: Arrival) -> None:
    header = arrival.header
    device = bucket.gradients.device
    tensor = decode(Codec(header.codec), arrival.encoded, header.elements, DTYPES[header.dtype], device)
    if header.kind is Kind.REDUCE:
        bucket.shares[bucket.members.index(arrival.source)] = tensor
    else:
        bucket.shard(header.part).copy_(tensor)
        bucket.missing.discard(header.part)


def _sum(bucket: _Bucket) -> torch.Tensor:
    """Of the owned shard, all members' shares, which are let go of."""
    own = bucket.shard(bucket.rank)
    in_order = [own if rank == bucket.rank else bucket.shares[rank] for rank in range(len(bucket.members))]
    total = in_order[0].clone()
    for share in in_order[1:]:
        total.add_(share)
    bucket.shares.clear()
    return total

"""The replica group: gradients of one bucket become their sum on every node that holds it.

As in the paper (arXiv 2206.01288, section 3.2) each member owns a shard: the others send it their gradients of that shard,
it adds them up and sends the sum to all. Adding happens in the group's order whatever the order of arrival, and every
member takes the owner's bytes, so that all hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from dtfm.kernels.codec import DTYPES, Codec, decode
from dtfm.node.admission import shards
from dtfm.node.inbox import Arrival
from dtfm.node.mailbox import Mailbox
from dtfm.node.share import Group
from dtfm.protos.frame import Kind

#: send(kind, destination, bucket, shard, gradients of that shard)
Send = Callable[[Kind, str, int, int, torch.Tensor], None]


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
) -> None:
    """Replaces ``gradients`` (flat tensors by bucket) by their sums over the buckets' groups.

    Runs in a thread of its own, beside backward: reads ``step`` from ``mailbox``, where the pipeline says Final for each
    bucket and the inbox puts what the peers send. Returns when every bucket is complete. Raises Closed.
    """
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
            for rank, member in enumerate(bucket.members):
                if rank != bucket.rank and rank in bucket.missing:
                    send(Kind.REDUCE, member, index, rank, bucket.shard(rank))
        else:
            _receive(bucket, item)
        if bucket.final and bucket.rank in bucket.missing and len(bucket.shares) == len(bucket.members) - 1:
            _sum_shares(bucket)
            for rank, member in enumerate(bucket.members):
                if rank != bucket.rank:
                    send(Kind.GATHER, member, index, bucket.rank, bucket.shard(bucket.rank))


def _receive(bucket: _Bucket, arrival: Arrival) -> None:
    header = arrival.header
    device = bucket.gradients.device
    tensor = decode(Codec(header.codec), arrival.encoded, header.elements, DTYPES[header.dtype], device)
    if header.kind is Kind.REDUCE:
        bucket.shares[bucket.members.index(arrival.source)] = tensor
    else:
        bucket.shard(header.part).copy_(tensor)
        bucket.missing.discard(header.part)


def _sum_shares(bucket: _Bucket) -> None:
    own = bucket.shard(bucket.rank)
    in_order = [own if rank == bucket.rank else bucket.shares[rank] for rank in range(len(bucket.members))]
    total = in_order[0].clone()
    for share in in_order[1:]:
        total.add_(share)
    own.copy_(total)
    bucket.shares.clear()
    bucket.missing.discard(bucket.rank)

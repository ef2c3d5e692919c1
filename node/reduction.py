"""The replica group: gradients of one bucket become their sum on every node that holds it.

As in the paper (arXiv 2206.01288, section 3.2) each member owns a shard: the others send it their gradients of that shard,
it adds them up and sends the sum to all. Adding happens in the group's order whatever the order of arrival, and every
member takes the owner's bytes, so that all hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from dtfm.kernels.codec import DTYPES, Codec, Encoded, decode, encode
from dtfm.node.admission import shards
from dtfm.node.inbox import Arrival
from dtfm.node.mailbox import Mailbox
from dtfm.node.share import Group
from dtfm.node.trace import Activity, span
from dtfm.protos.frame import Kind

#: send(destination, bucket, shard, gradients of that shard)
SendShare = Callable[[str, int, int, torch.Tensor], None]
#: send(destination, bucket, shard, sum of the gradients of that shard, its elements, their dtype)
SendSum = Callable[[str, int, int, Encoded, int, torch.dtype], None]


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
    send_share: SendShare,
    send_sum: SendSum,
    codec: Codec,
) -> None:
    """Replaces ``gradients`` (flat tensors by bucket) by their sums over the buckets' groups.

    Runs in a thread of its own, beside backward: reads ``step`` from ``mailbox``, where the pipeline says Final for each
    bucket and the inbox puts what the peers send. Sums go out under ``codec``. Returns when every bucket is complete. Raises
    Closed.
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
                    send_share(member, index, rank, bucket.shard(rank))
        else:
            _receive(bucket, item)
        if bucket.final and bucket.rank in bucket.missing and len(bucket.shares) == len(bucket.members) - 1:
            with span(Activity.REDUCE, step, index):
                total = _sum_shares(bucket, codec)
            own = bucket.shard(bucket.rank)
            for rank, member in enumerate(bucket.members):
                if rank != bucket.rank:
                    send_sum(member, index, bucket.rank, total, own.numel(), own.dtype)


def _receive(bucket: _Bucket, arrival: Arrival) -> None:
    header = arrival.header
    device = bucket.gradients.device
    tensor = decode(Codec(header.codec), arrival.encoded, header.elements, DTYPES[header.dtype], device)
    if header.kind is Kind.REDUCE:
        bucket.shares[bucket.members.index(arrival.source)] = tensor
    else:
        bucket.shard(header.part).copy_(tensor)
        bucket.missing.discard(header.part)


def _sum_shares(bucket: _Bucket, codec: Codec) -> Encoded:
    """Sums the owned shard in place and returns what the others get; the owner, too, goes on with what that decodes to."""
    own = bucket.shard(bucket.rank)
    in_order = [own if rank == bucket.rank else bucket.shares[rank] for rank in range(len(bucket.members))]
    total = in_order[0].clone()
    for share in in_order[1:]:
        total.add_(share)
    encoded = encode(codec, total)
    own.copy_(decode(encoded.codec, encoded.data, own.numel(), own.dtype, own.device))
    bucket.shares.clear()
    bucket.missing.discard(bucket.rank)
    return encoded

"""The replica group: gradients of one bucket become their sum on every node that holds it.

As in the paper (arXiv 2206.01288, section 3.2) each member owns a shard: the others send it their gradients of that shard,
it adds them up and sends the sum to all. Adding happens in the group's order whatever the order of arrival, and every
member takes the owner's bytes, so that all hold the same bits.

A shard goes piece by piece, and what a piece becomes takes the place of what it was: beside the gradients there are only
pieces on their way. One thread takes what arrives, another sends, which may have to wait for a link. So none of the members
waits for another to read: whoever holds more of a member's pieces than it can sum may stop reading from it for a while (see
Inbox.readable), because all send their pieces in one order, and the first that is not summed is always among those that came.

Under a codec that leaves elements out, what is left out of a message is added to the next step's message for the same piece:
of shares by each member, of sums by the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from dtfm.kernels.codec import DTYPES, Codec, Encoded, decode, encode
from dtfm.kernels.feedback import encode_with_feedback
from dtfm.node.host.trace import Activity, span
from dtfm.node.model.bucket import BucketSpec
from dtfm.node.model.placement import Group
from dtfm.node.model.pieces import pieces
from dtfm.node.transport.receiver import Arrival
from dtfm.node.transport.topic_queue import Closed, Mailbox
from dtfm.protos.frame import Kind

#: send(kind, destination, bucket, piece, encoded gradients of that piece or their sum, its elements, their dtype)
Send = Callable[[Kind, str, int, int, Encoded, int, torch.dtype], None]

#: By bucket and piece, what a node's messages have left out so far: 1-D float32 of the piece's elements. No more than one
#: message a step concerns a piece: its sum from the owner, a share from any other.
Residuals = Mapping[tuple[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Final:
    """This node adds nothing more to the gradients of ``bucket`` in this step."""

    bucket: int


@dataclass(slots=True)
class _Bucket:
    """How far the reduction of one bucket is. ``shares``: by piece and member, their gradients of pieces that this node owns;
    ``missing``: pieces that are not summed yet."""

    index: int
    gradients: torch.Tensor
    members: tuple[str, ...]
    rank: int
    final: bool = False
    shares: dict[int, dict[int, Arrival]] = field(default_factory=dict)
    missing: set[int] = field(init=False)

    def __post_init__(self) -> None:
        cut = pieces(self.gradients.numel(), len(self.members))
        self.missing = {number for number, (start, stop) in enumerate(cut) if stop > start}

    def piece(self, number: int) -> torch.Tensor:
        start, stop = pieces(self.gradients.numel(), len(self.members))[number]
        return self.gradients[start:stop]

    def owner(self, piece: int) -> int:
        return piece % len(self.members)

    def summable(self, piece: int) -> bool:
        return self.final and piece in self.missing and len(self.shares.get(piece, ())) == len(self.members) - 1


def sending_order(buckets: Iterable[BucketSpec]) -> list[int]:
    """Their indices in the order in which a backward finishes them; any two come in the same order on every node."""
    return [spec.index for spec in sorted(buckets, key=lambda spec: (-min(spec.layers), spec.index))]


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
    let_go: Callable[[Arrival], None] = lambda _: None,
) -> Residuals:
    """Replaces ``gradients`` (flat tensors by bucket, in `sending_order`) by their sums over the buckets' groups; before, each is
    given to ``keep``, so that the reduction can be done again with others.

    Runs in a thread of its own, beside backward: reads ``step`` from ``mailbox``, where the pipeline says Final for each
    bucket and the inbox puts what the peers send; ``let_go`` hears of each arrival that is used up. Everything goes out under
    ``codec``; ``carried`` is what it has left out in earlier steps. Returns, when every bucket is complete, what is to be
    carried instead once the step is committed. Raises Closed.
    """
    left_out: dict[tuple[int, int], torch.Tensor] = {}

    def encoded(bucket: _Bucket, piece: int) -> Encoded:
        tensor = bucket.piece(piece)
        with span(Activity.ENCODE, step, bucket.index):
            if not codec.sparse:
                return encode(codec, tensor)
            at = bucket.index, piece
            corrected = encode_with_feedback(codec, tensor, carried.get(at))
            left_out[at] = corrected.residual
            return corrected.encoded

    def send_share(bucket: _Bucket, number: int) -> None:
        owner, mine = bucket.members[bucket.owner(number)], bucket.piece(number)
        send(Kind.REDUCE, owner, bucket.index, number, encoded(bucket, number), mine.numel(), mine.dtype)

    def send_sum(bucket: _Bucket, number: int) -> None:
        message, own = encoded(bucket, number), bucket.piece(number)
        if message.codec is not Codec.OFF:  # the owner, too, goes on with what the others get
            own.copy_(decode(message.codec, message.data, own.numel(), own.dtype, own.device))
        for rank, member in enumerate(bucket.members):
            if rank != bucket.rank:
                send(Kind.GATHER, member, bucket.index, number, message, own.numel(), own.dtype)

    buckets = {
        index: _Bucket(index, flat, groups[index].members, groups[index].members.index(node))
        for index, flat in gradients.items()
        if len(groups[index].members) > 1
    }
    unsent = list(buckets.values())
    sender = ThreadPoolExecutor(1, "share")
    sent: list[Future[None]] = []

    def have_sent(work: Callable[[_Bucket, int], None], bucket: _Bucket, number: int) -> None:
        future = sender.submit(work, bucket, number)
        future.add_done_callback(lambda done: None if _error(done) is None else mailbox.close("sending failed"))
        sent.append(future)

    try:
        while any(b.missing or not b.final for b in buckets.values()):
            item = mailbox.get(step)
            index = item.bucket if isinstance(item, Final) else item.header.index
            bucket = buckets.get(index)
            if bucket is None:  # held by this node alone
                continue
            if isinstance(item, Final):
                bucket.final = True
                keep(index, bucket.gradients)
                while unsent and unsent[0].final:
                    first = unsent.pop(0)
                    for number in sorted(first.missing):
                        if first.owner(number) != first.rank:
                            have_sent(send_share, first, number)
                ready = [number for number in sorted(bucket.shares) if bucket.summable(number)]
            elif item.header.kind is Kind.REDUCE:
                number = item.header.part
                bucket.shares.setdefault(number, {})[bucket.members.index(item.source)] = item
                ready = [number] if bucket.summable(number) else []
            else:
                with span(Activity.DECODE, step, index):
                    bucket.piece(item.header.part).copy_(_decoded(item, bucket.gradients.device))
                bucket.missing.discard(item.header.part)
                let_go(item)
                ready = []
            for number in ready:
                with span(Activity.REDUCE, step, index):
                    _sum(bucket, number)
                bucket.missing.discard(number)
                for share in bucket.shares.pop(number).values():
                    let_go(share)
                have_sent(send_sum, bucket, number)
            del item
        for future in sent:
            future.result()
    except Closed:
        for future in sent:
            if future.done() and (error := _error(future)) is not None:
                raise error from None
        raise
    finally:
        sender.shutdown(cancel_futures=True)
    return left_out


def _error(done: Future[None]) -> BaseException | None:
    return None if done.cancelled() else done.exception()


def _decoded(arrival: Arrival, device: torch.device) -> torch.Tensor:
    header = arrival.header
    return decode(Codec(header.codec), arrival.encoded, header.elements, DTYPES[header.dtype], device)


def _sum(bucket: _Bucket, number: int) -> None:
    """Puts the sum of all members' shares of an owned piece in the place of this node's. What comes before that one in the
    group's order is added up in the memory of the first, which is used up."""
    own, shares = bucket.piece(number), bucket.shares[number]
    total = own
    for rank in range(len(bucket.members)):
        if rank == bucket.rank:
            total = own if rank == 0 else own.add_(total)
        else:
            share = _decoded(shares[rank], own.device)
            total = share if rank == 0 else total.add_(share)

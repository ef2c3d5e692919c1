"""The replica group: every node that holds a bucket replaces its gradients by their sum over the group.

As in the paper (arXiv 2206.01288, section 3.2) each member owns a shard: the others send it their gradients of that shard, it
adds them up and sends the sum to all. It adds in the group's order, whatever the order of arrival, and every member takes the
owner's bytes, so that all hold the same bits.

A shard travels in pieces, and a piece's sum replaces the piece in place: beside the gradients, memory holds only pieces on
their way. One thread takes arriving pieces; another sends, which may wait for a link. So no member waits for another to
read. A member that holds more of another's pieces than it can sum may stop reading from it for a while (see
Receiver.readable). All members send their pieces in the same order, so the first piece without a sum has always come.

After the sums of a bucket with matrices that Muon updates, their owners send the updates: matrix_updates.py. The state of one
bucket: bucket_sum.py.

Under a sparse codec one member of each island sends a piece to all, and all add up the pieces that were sent. Most of the
elements that it left out are added to its next changes of the same elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch

from dtfm.kernels.codec import Codec, Encoded, decode, encode, encode_with_feedback
from dtfm.node.host.cuda_streams import Beside, wait_beside
from dtfm.node.host.trace import Activity, span
from dtfm.node.host.work import WORK
from dtfm.node.model.bucket import Bucket
from dtfm.node.model.placement import Placement
from dtfm.node.training.reduction.bucket_sum import BucketSum
from dtfm.node.training.reduction.contribution_bound import Clipped, ContributionBound
from dtfm.node.training.reduction.matrix_updates import MatrixUpdates
from dtfm.node.training.step.pipeline import NonFinite, is_finite
from dtfm.node.transport.receiver import Arrival, Closed, TopicQueue
from dtfm.node.transport.sender import What, ready
from dtfm.protos.frame import Kind

#: The signature of Sender.send.
Send = Callable[[str, What, Future[Encoded]], None]

#: By bucket, what this node's messages have left out so far: 1-D float32 of the bucket's elements, in the host's memory.
Residuals = Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Final:
    """This node adds nothing more to the gradients of ``bucket`` in this step, which are computed ``before``."""

    bucket: int
    before: Beside = nullcontext


class Reducer:
    """The reductions of one generation, in two threads of its own.

    ``queue`` takes, by step, `Final` for each bucket and the tensors that peers send. ``came`` is called with each tensor
    before it is used, ``let_go`` when it is used up. ``carried`` are the residuals to begin with. ``bound`` limits what other
    members add; None: nothing does. ``with_matrices`` are the buckets with matrices that Muon updates in these steps.
    """

    def __init__(
        self,
        placement: Placement,
        send: Send,
        let_go: Callable[[Arrival], None] = lambda _: None,
        carried: Residuals | None = None,
        bound: ContributionBound | None = None,
        came: Callable[[Arrival], None] = lambda _: None,
        with_matrices: Mapping[int, Bucket] = MappingProxyType({}),
    ) -> None:
        self.placement = placement
        self.with_matrices = with_matrices
        self.bound = bound
        self.queue: TopicQueue[int, Arrival | Final] = TopicQueue()
        self.carried: Residuals = carried or {}
        """Residuals of the committed exchanges."""
        self.left_out: Residuals = {}
        """Residuals to carry if the exchange last reduced is committed."""
        self.send = send
        self.let_go = let_go
        self.came = came
        self.sending = ThreadPoolExecutor(1, "reduce send")
        self._thread = ThreadPoolExecutor(1, "reduce")

    def start(
        self, step: int, gradients: Mapping[int, torch.Tensor], codec: Codec, keep: Callable[[int, torch.Tensor], None]
    ) -> Future[None]:
        """Runs `reduce` beside the backward passes."""
        return self._thread.submit(self.reduce, step, gradients, codec, keep)

    def reduce(
        self, step: int, gradients: Mapping[int, torch.Tensor], codec: Codec, keep: Callable[[int, torch.Tensor], None]
    ) -> None:
        """Replaces ``gradients`` (flat tensors by bucket, in `sending_order`) by their sums over the buckets' groups.

        Before that, each is passed to ``keep``, so that the reduction can be repeated with other nodes. Messages are encoded
        with ``codec``. Returns when every bucket is complete. Raises Closed, and what sending raises.
        """
        if self.bound is not None:
            self.bound.begin()
        self.left_out = Reduction(self, step, gradients, codec, keep).run()

    @property
    def clipped(self) -> Mapping[str, Clipped]:
        """By member, the addends that were clipped in the step last reduced."""
        return self.bound.clipped if self.bound is not None else {}

    def commit(self, step: int) -> None:
        """``step``, the one last reduced, is committed. An aborted step leaves no residuals."""
        self.carried = {**self.carried, **self.left_out}  # also of pieces that others send now
        if self.bound is not None:
            self.bound.commit()
        self.queue.forget(step)

    def close(self) -> None:
        """Ends the threads, and frees the objects of the callbacks. Close ``queue`` first."""
        self._thread.shutdown()
        self.sending.shutdown()
        del self.send, self.let_go, self.came


class Reduction:
    """One step's reduction."""

    def __init__(
        self,
        reducer: Reducer,
        step: int,
        gradients: Mapping[int, torch.Tensor],
        codec: Codec,
        keep: Callable[[int, torch.Tensor], None],
    ) -> None:
        self._reducer = reducer
        self._placement = reducer.placement
        self._step = step
        self._codec = codec
        self._keep = keep
        self._left_out: dict[int, torch.Tensor] = {}
        groups = self._placement.groups
        self._buckets: dict[int, BucketSum] = {}
        for index, flat in gradients.items():
            group, matrices = groups[index], reducer.with_matrices.get(index)
            if len({*group.islands} if codec.sparse else group.members) > 1:
                rank = group.members.index(self._placement.node)
                updates = None if matrices is None else MatrixUpdates(matrices, len(group.members), rank)
                self._buckets[index] = BucketSum(index, flat, group, rank, codec.sparse, updates)
        self._unsent = list(self._buckets.values())
        self._sent: list[Future[None]] = []

    def run(self) -> Residuals:
        """Returns the residuals of the sent messages."""
        try:
            with WORK.working():
                while not all(bucket.is_complete for bucket in self._buckets.values()):
                    self._take(self._reducer.queue.get(self._step))
                    WORK.did()
            wait(self._sent)
            _raise_first(self._sent)
        except Closed:
            _raise_first(self._sent)
            raise
        finally:
            self._end_sending()
        return self._left_out

    def _end_sending(self) -> None:
        for future in self._sent:
            future.cancel()
        wait(self._sent)
        self._sent.clear()
        for device in {bucket.gradients.device for bucket in self._buckets.values()}:
            wait_beside(device)

    def _take(self, item: Arrival | Final) -> None:
        bucket = self._buckets.get(item.bucket if isinstance(item, Final) else item.header.index)
        if bucket is None:
            return  # held by this node alone
        if isinstance(item, Final):
            bucket.final = item.before
        else:
            self._reducer.came(item)
        with bucket.beside():
            self._use(bucket, item)

    def _use(self, bucket: BucketSum, item: Arrival | Final) -> None:
        if isinstance(item, Final):
            self._make_final(bucket)
        elif item.header.kind is Kind.REDUCE:
            number = item.header.part
            bucket.addends.setdefault(number, {})[bucket.members.index(item.source)] = item
            if bucket.summable(number):
                self._add_up(bucket, number)
        elif item.header.kind is Kind.ORTHOGONAL:
            assert bucket.updates is not None
            bucket.updates.take(item)
            self._reducer.let_go(item)
        else:
            with span(Activity.DECODE, self._step, bucket.index):
                summed = item.decoded(bucket.gradients.device)
                if not is_finite(summed):
                    raise NonFinite(
                        f"the sum of bucket {bucket.index} from {item.source} is NaN or infinite", item.source
                    )
                bucket.piece(item.header.part).copy_(summed)
            self._has_sum(bucket, item.header.part)
            self._reducer.let_go(item)

    def _make_final(self, bucket: BucketSum) -> None:
        if not is_finite(bucket.gradients):
            raise NonFinite(f"the gradients of bucket {bucket.index} are NaN or infinite")
        self._keep(bucket.index, bucket.gradients)
        for number in sorted(bucket.missing) if bucket.sparse else ():
            if bucket.rank in bucket.added(number):
                self._spread(bucket, number)
        while self._unsent and self._unsent[0].final and not bucket.sparse:
            first = self._unsent.pop(0)
            for number in sorted(first.missing):
                if first.group.owner(number) != self._placement.node:
                    self._submit(self._send_addend, first, number)
        for number in sorted(bucket.missing):
            if bucket.summable(number):
                self._add_up(bucket, number)

    def _add_up(self, bucket: BucketSum, number: int) -> None:
        with span(Activity.REDUCE, self._step, bucket.index):
            bucket.add_up(number, self._reducer.bound)
        for addend in bucket.addends.pop(number, {}).values():
            self._reducer.let_go(addend)
        if not bucket.sparse:
            self._submit(self._send_sum, bucket, number)
        self._has_sum(bucket, number)

    def _has_sum(self, bucket: BucketSum, number: int) -> None:
        """The piece is summed. After the last one, this node finds the updates of its matrices: once it has sent its own sums,
        which a codec changes."""
        bucket.missing.discard(number)
        for matrix in bucket.updates.own if bucket.updates and not bucket.missing else ():
            self._submit(self._send_update, bucket, matrix)

    def _spread(self, bucket: BucketSum, number: int) -> None:
        """Sends this node's part of a piece to all others, and goes on with the values that they get."""
        message, own = self._encode(bucket, number), bucket.piece(number)
        own.copy_(_arriving(message, own))
        self._submit(partial(self._send_to_others, Kind.REDUCE, message), bucket, number)

    # In the sending thread

    def _submit(self, work: Callable[[BucketSum, int], None], bucket: BucketSum, number: int) -> None:
        future = self._reducer.sending.submit(self._beside, work, bucket, number)
        queue = self._reducer.queue
        future.add_done_callback(lambda done: None if _error(done) is None else queue.close("sending failed"))
        self._sent.append(future)

    def _beside(self, work: Callable[[BucketSum, int], None], bucket: BucketSum, number: int) -> None:
        with bucket.beside():
            work(bucket, number)

    def _send_addend(self, bucket: BucketSum, number: int) -> None:
        message, mine = self._encode(bucket, number), bucket.piece(number)
        self._send(Kind.REDUCE, bucket.group.owner(number), bucket, number, message, mine)

    def _send_sum(self, bucket: BucketSum, number: int) -> None:
        message, own = self._encode(bucket, number), bucket.piece(number)
        if message.codec is not Codec.OFF:  # the owner must go on with the same values as the others
            own.copy_(_arriving(message, own))
        self._send_to_others(Kind.GATHER, message, bucket, number)

    def _send_update(self, bucket: BucketSum, matrix: int) -> None:
        assert bucket.updates is not None
        with span(Activity.REDUCE, self._step, bucket.index):
            found = [*bucket.updates.find(matrix, bucket.gradients)]
        for number, update in found:
            self._send_to_others(Kind.ORTHOGONAL, encode(Codec.OFF, update), bucket, number, update)

    def _send_to_others(
        self, kind: Kind, message: Encoded, bucket: BucketSum, number: int, piece: torch.Tensor | None = None
    ) -> None:
        for rank, member in enumerate(bucket.members):
            if rank != bucket.rank:
                self._send(kind, member, bucket, number, message, bucket.piece(number) if piece is None else piece)

    def _send(
        self, kind: Kind, destination: str, bucket: BucketSum, number: int, message: Encoded, piece: torch.Tensor
    ) -> None:
        generation = self._placement.generation
        what = What(kind, generation, self._step, bucket.index, number, piece.numel(), piece.dtype)
        self._reducer.send(destination, what, ready(message))

    def _encode(self, bucket: BucketSum, number: int) -> Encoded:
        index, (start, stop), piece = bucket.index, bucket.range(number), bucket.piece(number)
        with span(Activity.ENCODE, self._step, index):
            if not bucket.sparse:
                return encode(self._codec, piece)
            carried = self._reducer.carried.get(index)
            before = None if carried is None else carried[start:stop].to(piece.device)
            encoded, left_out = encode_with_feedback(self._codec, piece, before)
            if index not in self._left_out:
                self._left_out[index] = torch.zeros(len(bucket.gradients)) if carried is None else carried.clone()
            self._left_out[index][start:stop] = left_out
            return encoded


def _raise_first(futures: Sequence[Future[None]]) -> None:
    """Raises the error of the first future that failed. Its traceback refers to this frame, which therefore forgets it: a
    cycle would keep the gradients from being freed."""
    errors = [error for error in map(_error, filter(Future.done, futures)) if error is not None]
    try:
        if errors:
            raise errors[0] from None
    finally:
        errors.clear()


def _error(done: Future[None]) -> BaseException | None:
    return None if done.cancelled() else done.exception()


def _arriving(message: Encoded, sent: torch.Tensor) -> torch.Tensor:
    """The piece as others get it."""
    return decode(message.codec, message.data, sent.numel(), sent.dtype, sent.device)

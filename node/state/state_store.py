"""The model state that this node holds in memory, and serves to peers: once, or kept up step by step."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field, replace

import torch

from dtfm.kernels.codec import Codec
from dtfm.node.model.bucket import Bucket
from dtfm.node.model.frozen import FrozenWeights
from dtfm.node.model.optimizer.optimizer import terms_of
from dtfm.node.state.images import Images
from dtfm.node.state.update import pack
from dtfm.protos.control_pb2 import Commit
from dtfm.protos.frame import Header, Kind, frames
from dtfm.protos.peer_pb2 import StandbyRequest, StateRequest
from dtfm.scheduler.model.rounds import NO_ROUNDS, Rounds

TERMS = struct.Struct("<5d")
"""The payload of a COMMITTED frame: the numbers of `Terms`, in order."""

MAX_BEHIND = 8
"""Most steps of one bucket that may wait for a standby; a slower one is dropped."""

MOST_WAITING_BYTES = 512 << 20
"""Most bytes that may wait for a standby beyond two steps, which any standby may need."""

Tensor = tuple[Header, memoryview]
"""A tensor to send: its header and its bytes, not yet cut into frames."""

Donation = tuple[Header, Iterator[memoryview]]
"""The same, piece by piece. All pieces but the last are whole numbers of frames; there is at least one."""


@dataclass(frozen=True, slots=True)
class HeldState:
    """State in memory: buckets by index, after ``step``. ``rounds`` are the plan's."""

    step: int = 0
    buckets: Mapping[int, Bucket] = field(default_factory=dict)
    rounds: Rounds = NO_ROUNDS


class Subscription:
    """A standby's subscription to some buckets: their state, then the gradients and norm of every later step. With rounds, the
    state that islands share (`Bucket.shared`), then the sum and the commit of every later exchange.

    Lives on one event loop; methods marked so may be called from any thread.
    """

    def __init__(self, store: StateStore, buckets: Collection[int], loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop
        self._to_send = deque(sorted(set(buckets)))
        self._waiting: dict[int, deque[Tensor]] = {index: deque() for index in self._to_send}
        self._waiting_bytes = 0  # includes the tensor that is being sent
        self._counting = threading.Lock()
        self._newest = 0
        self._news = asyncio.Event()
        self.ended = ""
        """Why it has ended; empty while it has not."""
        self.started: set[int] = set()
        """Buckets whose state has been copied for it, so that their steps must follow. Changed and read by the store."""

    def count(self, change: int) -> None:
        """Adds ``change`` to the bytes that wait or are being sent. From any thread."""
        with self._counting:
            self._waiting_bytes = 0 if self.ended else self._waiting_bytes + change

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Queues tensors, whose bytes were counted before. From any thread."""
        self._loop.call_soon_threadsafe(self._put, tensors)

    def end(self, why: str) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._end, why)

    async def frames(self) -> AsyncIterator[bytes]:
        """The frames to send: each bucket's state, then its steps, which go before the state of further buckets.

        Raises LookupError when the subscription has ended.
        """
        sending: int | None = None  # the bucket whose state is being sent
        state: AsyncIterator[bytes] | None = None
        served = -1
        while not self.ended:
            self._news.clear()
            ready = [i for i, queue in self._waiting.items() if queue and i != sending]
            if ready:
                index = served = min(ready, key=lambda i: (i <= served, i))  # round robin
                header, data = self._waiting[index].popleft()
                for frame in frames(replace(header, part=self._newest), data):
                    yield frame
                data = memoryview(b"")
                self.count(-header.total)
            elif state is not None and (frame_of_state := await anext(state, None)) is not None:
                yield frame_of_state
            elif self._to_send:
                sending = self._to_send.popleft()
                state = self._state(sending)
            elif sending is not None:
                sending = state = None
            else:
                await self._news.wait()
        raise LookupError(self.ended)

    async def _state(self, bucket: int) -> AsyncIterator[bytes]:
        header, pieces = await asyncio.to_thread(self._store.start, self, bucket)
        self._newest = max(self._newest, header.step)
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                for frame in frames(header, piece):
                    yield frame
                header = replace(header, offset=header.offset + len(piece))
        except OSError as error:  # it could not be kept
            raise LookupError(f"NOT_HELD: {error}") from error

    def close(self) -> None:
        """From any thread."""
        self._store.unsubscribe(self)
        self.end("the standby has gone")

    def _put(self, tensors: Sequence[Tensor]) -> None:
        if self.ended:
            return
        for header, data in tensors:
            self._newest = max(self._newest, header.part)
            self._waiting[header.index].append((header, data))
        behind = max(map(len, self._waiting.values()), default=0) / 2  # a step is two tensors: gradients and norm
        if behind > MAX_BEHIND or (behind > 2 and self._waiting_bytes > MOST_WAITING_BYTES):
            waits = f"{behind:.0f} steps with {self._waiting_bytes / 2**20:.0f} MiB wait"
            self._end(f"TOO_SLOW: {waits}; steps are made faster than this link carries them")
        self._news.set()

    def _end(self, why: str) -> None:
        self.ended = self.ended or why
        for waiting in self._waiting.values():
            waiting.clear()  # nobody may ever read it
        self.count(0)
        self._news.set()


class StateStore:
    """The state of this node's buckets.

    One thread, the trainer's, changes it; any thread may begin to read it for peers: see ``images``. They take turns: a reader
    sees the state before a change or after it.
    """

    def __init__(self, images: Images | None = None) -> None:
        self.images = images or Images()
        self.frozen = FrozenWeights()
        """The run's, which are no state; peers may ask for the layers that this node has."""
        self._turn = threading.Lock()
        self._held = HeldState()
        self._voting = 0  # the generation whose summed gradients of the next step are in the buckets; 0: they are not
        self._codec = Codec.OFF  # the codec of these sums
        self._sums: Mapping[int, torch.Tensor] | None = None  # instead of those in the buckets
        self._subscriptions: list[Subscription] = []

    @property
    def held(self) -> HeldState:
        return self._held

    # Called by the trainer's thread

    def replace(self, held: HeldState) -> None:
        """Holds ``held`` from now on. Ends subscriptions to buckets that are no longer held, or as of another step; with other
        rounds, all."""
        with self._turn:
            before, self._held, self._voting = self._held, held, 0
            kept = held.buckets.keys() if held.step == before.step else set[int]()
            why = "the plan has other rounds" if held.rounds != before.rounds else ""
            for subscription in list(self._subscriptions):
                missing = sorted(subscription.started - kept)
                if why or missing:
                    self.unsubscribe(subscription)
                    subscription.end(f"NOT_HELD: {why or f'buckets {missing} are no longer held here as of that step'}")

    def move(self, bucket: Bucket, elsewhere: Bucket | None) -> None:
        """Holds ``elsewhere``, the same state in other memory, in place of a held ``bucket``; None: drops it. The unread
        part for others is copied, and the bucket let go."""
        if elsewhere is bucket:
            return
        with self._turn:
            self.images.keep(of=bucket)
            buckets = {**self._held.buckets}
            del buckets[bucket.spec.index]
            if elsewhere is not None:
                buckets[bucket.spec.index] = elsewhere
            self._held, self._voting = replace(self._held, buckets=buckets), 0

    def vote(self, generation: int, codec: Codec = Codec.OFF) -> None:
        """Sends the summed gradients of the next step to the standbys, before the commit: should this node be lost right
        after it, they can apply the step. The gradients must stay until ``retract`` or ``apply``. They were summed
        with this ``codec``."""
        with self._turn:
            self._voting, self._codec = generation, codec
            subscriptions = [subscription for subscription in list(self._subscriptions) if not subscription.ended]
            for index in sorted({i for subscription in subscriptions for i in subscription.started}):
                self._send_gradients(index, [s for s in subscriptions if index in s.started])

    def retract(self) -> None:
        """To be called before the gradients change."""
        with self._turn:
            self._voting = 0

    def apply(self, commit: Commit, update: Callable[[], None]) -> None:
        """Runs ``update``, which changes the held buckets, by the gradients voted for, to their state after the commit's step.

        If it raises, the buckets are of no use to anybody and are no longer held.
        """
        step = commit.step
        with self._turn:
            before, self._voting = self._held, 0
            self._held, follows = HeldState(step, rounds=before.rounds), before.rounds.at_rest(step)
            self.images.keep(shared=follows)
            update()
            self._held = replace(before, step=step)
            for subscription in list(self._subscriptions):
                started = sorted(subscription.started) if follows else ()
                subscription.count(len(started) * TERMS.size)
                subscription.put([self._committed(commit, index) for index in started])

    @contextmanager
    def set_aside(self, sums: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Inside, the buckets have another state for a while. Nobody gets any of it, except the part that islands share. By
        bucket, ``sums`` are the gradients voted for."""
        with self._turn:
            self.images.keep(shared=False)
            self._sums = sums
        try:
            yield
        finally:
            with self._turn:
                self._sums = None

    # Called from any thread

    def subscribe(self, request: StandbyRequest, loop: asyncio.AbstractEventLoop) -> Subscription:
        """A subscription to be read on ``loop``. Raises LookupError for a bucket that is not held here, or not in this way."""
        buckets = request.buckets
        with self._turn:
            if request.shared != bool(self._held.rounds.count):
                raise LookupError("NOT_HELD: with rounds, standbys follow exchanges alone; without, every step")
            if missing := sorted(set(buckets) - self._held.buckets.keys()):
                raise LookupError(f"NOT_HELD: buckets {missing} are not held here, but {sorted(self._held.buckets)}")
            subscription = Subscription(self, buckets, loop)
            self._subscriptions.append(subscription)
            return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Waits for no turn."""
        with suppress(ValueError):
            self._subscriptions.remove(subscription)

    def start(self, subscription: Subscription, bucket: int) -> Donation:
        """The bucket's present state; the subscription gets its steps from the next one on. Raises LookupError."""
        with self._turn:
            shared, rested = self._held.rounds.count > 0, self._held.rounds.rested(self._held.step)
            header, pieces = self._donation(bucket, 0, 0, outlasts=True, shared=shared)
            subscription.started.add(bucket)
            if self._voting:
                self._send_gradients(bucket, [subscription])
            return replace(header, step=rested, part=rested), pieces

    def donate(self, request: StateRequest) -> Donation:
        """The requested bytes of the bucket's state as of the requested step, while it is held: its receiver takes part in the
        next step. Or the layer's frozen weights, from the first requested byte on.

        Raises LookupError, which names the held state instead.
        """
        if request.frozen:
            size, pieces = self.frozen.donate(request.bucket, request.offset)
            return _header(Kind.STATE, request.generation, request.step, request.bucket, request.step, size), pieces
        with self._turn:
            if self._held.step != request.step:
                raise LookupError(
                    f"NOT_HELD: state as of step {request.step} is not held here, but of {self._held.step}"
                )
            wanted = request.bucket, request.offset, request.generation, request.end
            return self._donation(*wanted, outlasts=False, shared=request.shared)

    def _donation(
        self, bucket: int, offset: int, generation: int, end: int = 0, *, outlasts: bool, shared: bool
    ) -> Donation:
        if bucket not in self._held.buckets:
            raise LookupError(f"NOT_HELD: bucket {bucket} is not held here, but {sorted(self._held.buckets)}")
        if self._sums is not None and not shared:
            raise LookupError("NOT_HELD: for a while this node has the state of another, whose work it does again")
        reading = self.images.read(self._held.buckets[bucket], offset, end, outlasts=outlasts, shared=shared)
        step = self._held.step
        return _header(Kind.STATE, generation, step, bucket, step, reading.size_bytes), reading

    def _committed(self, commit: Commit, bucket: int) -> Tensor:
        terms = terms_of(commit, self._held.buckets[bucket].spec)
        packed = TERMS.pack(*astuple(terms))
        return _header(Kind.COMMITTED, 0, commit.step, bucket, commit.step, len(packed)), memoryview(packed)

    def _send_gradients(self, bucket: int, subscriptions: Sequence[Subscription]) -> None:
        """Sends the next step's, if that is one that standbys follow."""
        step, held = self._held.step + 1, self._held.buckets[bucket]
        if not self._held.rounds.at_rest(step):
            return
        sums = held.gradients if self._sums is None else self._sums[bucket]
        packed = pack(sums, self._codec, held.updates if not self._held.rounds.count else None)
        newest = self._held.rounds.rested(step - 1)  # the last step that changed the standbys' state
        header = _header(Kind.UPDATE, self._voting, step, bucket, newest, len(packed.data), packed.codec)
        for subscription in subscriptions:
            subscription.count(len(packed.data))
            subscription.put([(header, packed.data)])


def _header(
    kind: Kind, generation: int, step: int, bucket: int, newest: int, size: int, codec: Codec = Codec.OFF
) -> Header:
    return Header(kind, codec, 0, generation, step, bucket, newest, size, size)

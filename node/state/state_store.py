"""What this node holds of the model's state, and gives to peers: once, or kept up with step by step."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dtfm.node.host.trace import Beside, tell_beside
from dtfm.node.model.bucket import Bucket, bucket_bytes
from dtfm.protos.frame import Header, Kind, frames
from dtfm.protos.peer_pb2 import StateRequest

NORM = struct.Struct("<d")
"""How a COMMITTED frame tells the global gradient norm."""

MAX_BEHIND = 8
"""So many steps of one bucket may wait for a follower; one that is slower is let go."""

MOST_WAITING_BYTES = 512 << 20
"""Beyond two steps, which any follower may need, no more than this may wait for one."""

Piece = tuple[Header, memoryview]
"""What travels as the frames of one tensor."""


@dataclass(frozen=True, slots=True)
class Held:
    """State that a node has in memory: buckets by index, as of after ``step``."""

    step: int
    buckets: Mapping[int, Bucket]


class Follower:
    """A peer's subscription to some buckets: their state, then every later step's gradients and norm. On one event loop."""

    def __init__(self, holding: Holding, buckets: Collection[int], loop: asyncio.AbstractEventLoop) -> None:
        self._holding = holding
        self._loop = loop
        self._to_send = deque(sorted(set(buckets)))
        self._waiting: dict[int, deque[Piece]] = {index: deque() for index in self._to_send}
        self._waiting_bytes = 0  # what is being sent included
        self._counting = threading.Lock()
        self._newest = 0
        self._news = asyncio.Event()
        self.ended = ""
        """Why there is nothing more to follow here; empty: there is."""
        self.has: set[int] = set()
        """Buckets whose state is on its way: what is done to them must follow. Guarded by the holding's lock."""

    def count(self, change: int) -> None:
        """So many bytes more will be put, or fewer are left to send. From any thread."""
        with self._counting:
            self._waiting_bytes = 0 if self.ended else self._waiting_bytes + change
            tell_beside(Beside.UPDATES, self._waiting_bytes, self)

    def put(self, pieces: Sequence[Piece]) -> None:
        """What was counted. From any thread."""
        self._loop.call_soon_threadsafe(self._put, pieces)

    def end(self, why: str) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._end, why)

    async def frames(self) -> AsyncIterator[bytes]:
        """What to send, without end: each bucket's state, then its steps, which go before the state of further buckets.
        Raises LookupError when there is nothing more to follow here."""
        state: Iterator[bytes] = iter(())
        sending: int | None = None  # the bucket whose state is on its way
        served = -1
        while not self.ended:
            self._news.clear()
            ready = [i for i, queue in self._waiting.items() if queue and i != sending]
            if ready:
                index = served = min(ready, key=lambda i: (i <= served, i))  # in turn
                header, data = self._waiting[index].popleft()
                for frame in frames(replace(header, part=self._newest), data):
                    yield frame
                data = memoryview(b"")
                self.count(-header.total)
            elif (piece := next(state, None)) is not None:
                yield piece
            elif self._to_send:
                sending = self._to_send.popleft()
                if (bucket := self._holding.held.buckets.get(sending)) is not None:
                    tell_beside(Beside.UPDATES, bucket_bytes(bucket.spec, bucket.parameters.dtype), (self, "state"))
                header, data = await asyncio.to_thread(self._holding.begin, self, sending)
                self._newest = max(self._newest, header.step)
                state = frames(header, data)
                data = memoryview(b"")  # it goes with its last frame, before the next is copied
            elif sending is not None:
                sending, state = None, iter(())
                tell_beside(Beside.UPDATES, 0, (self, "state"))
            else:
                await self._news.wait()
        raise LookupError(self.ended)

    def close(self) -> None:
        """From any thread."""
        self._holding.forget(self)
        self.end("it follows no more")

    def _put(self, pieces: Sequence[Piece]) -> None:
        if self.ended:
            return
        for header, data in pieces:
            self._newest = max(self._newest, header.part)
            self._waiting[header.index].append((header, data))
        behind = max(map(len, self._waiting.values()), default=0) / 2  # of a step both gradients and norm
        if behind > MAX_BEHIND or (behind > 2 and self._waiting_bytes > MOST_WAITING_BYTES):
            waits = f"{behind:.0f} steps with {self._waiting_bytes / 2**20:.0f} MiB wait"
            self._end(f"TOO_SLOW: {waits}; they come quicker than this link takes them")
        self._news.set()

    def _end(self, why: str) -> None:
        self.ended = self.ended or why
        for waiting in self._waiting.values():
            waiting.clear()  # nobody may ever read it
        self.count(0)
        tell_beside(Beside.UPDATES, 0, (self, "state"))
        self._news.set()


class Holding:
    """The state of this node's buckets. One thread trains on them and changes them, others read what peers ask for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = Held(0, {})
        self._voting = 0  # the generation in which the next step's gradients are summed and voted for; 0: they are not
        self._followers: list[Follower] = []

    @property
    def held(self) -> Held:
        return self._held

    def replace(self, held: Held) -> None:
        """What is held from now on. Who follows a bucket that is no longer among it, or of another past, is let go."""
        with self._lock:
            kept = held.buckets.keys() if held.step == self._held.step else ()
            self._held, self._voting = held, 0
            for follower in [f for f in self._followers if not f.has <= set(kept)]:
                self._followers.remove(follower)
                follower.end(f"NOT_HELD: of the buckets {sorted(follower.has)} some are no longer held here")

    def vote(self, generation: int) -> None:
        """The held buckets' gradients are those of the next step, summed; until ``retract`` or ``apply`` they stay. Followers
        get them already, so that they can go on from here should this node be lost right after the commit."""
        with self._lock:
            self._voting = generation
            followers = [follower for follower in self._followers if not follower.ended]
            for index in sorted({i for follower in followers for i in follower.has}):
                self._give_update(index, [follower for follower in followers if index in follower.has])

    def retract(self) -> None:
        """The gradients are about to change."""
        with self._lock:
            self._voting = 0

    def apply(self, step: int, gradient_norm: float, update: Callable[[], None]) -> None:
        """``update`` changes the held buckets, by the gradients voted for, to their state as of after ``step``. Should it fail
        half-way, what is left is of no use to anybody, and is not held any more."""
        with self._lock:
            buckets, self._held, self._voting = self._held.buckets, Held(step, {}), 0
            update()
            self._held = Held(step, buckets)
            norm = memoryview(NORM.pack(gradient_norm))
            for follower in self._followers:
                headers = [_header(Kind.COMMITTED, 0, step, index, step, len(norm)) for index in sorted(follower.has)]
                follower.count(len(headers) * len(norm))
                follower.put([(header, norm) for header in headers])

    def follow(self, buckets: Collection[int], loop: asyncio.AbstractEventLoop) -> Follower:
        """To be read on ``loop``. Raises LookupError for a bucket that is not held here."""
        with self._lock:
            if missing := sorted(set(buckets) - self._held.buckets.keys()):
                raise LookupError(f"NOT_HELD: buckets {missing} are not held here, but {sorted(self._held.buckets)}")
            follower = Follower(self, buckets, loop)
            self._followers.append(follower)
            return follower

    def forget(self, follower: Follower) -> None:
        with self._lock:
            if follower in self._followers:
                self._followers.remove(follower)

    def begin(self, follower: Follower, bucket: int) -> Piece:
        """A copy of a bucket's state as it is now; the follower gets its steps from the next one on. Raises LookupError."""
        with self._lock:
            state = self._copy(bucket, 0, 0)
            follower.has.add(bucket)
            if self._voting:
                self._give_update(bucket, [follower])
            return state

    def donate(self, request: StateRequest) -> Piece:
        """The asked-for bucket's state as of the asked-for step, from the asked-for byte on, copied. Raises LookupError saying
        what is held instead."""
        with self._lock:
            if self._held.step != request.step:
                raise LookupError(
                    f"NOT_HELD: state as of step {request.step} is not held here, but of {self._held.step}"
                )
            return self._copy(request.bucket, request.offset, request.generation)

    def _copy(self, bucket: int, offset: int, generation: int) -> Piece:
        if bucket not in self._held.buckets:
            raise LookupError(f"NOT_HELD: bucket {bucket} is not held here, but {sorted(self._held.buckets)}")
        pieces = []
        for piece in self._held.buckets[bucket].export():
            pieces.append(piece[min(offset, len(piece)) :])
            offset -= min(offset, len(piece))
        state = b"".join(pieces)
        step = self._held.step
        return _header(Kind.STATE, generation, step, bucket, step, len(state)), memoryview(state)

    def _give_update(self, bucket: int, followers: Sequence[Follower]) -> None:
        gradients = self._held.buckets[bucket].gradients
        for follower in followers:
            follower.count(gradients.nbytes)
        data = memoryview(bytes(gradients.detach().cpu().view(torch.uint8).numpy().data))
        header = _header(Kind.UPDATE, self._voting, self._held.step + 1, bucket, self._held.step, len(data))
        for follower in followers:
            follower.put([(header, data)])


def _header(kind: Kind, generation: int, step: int, bucket: int, newest: int, size: int) -> Header:
    return Header(kind, 0, 0, generation, step, bucket, newest, size, size)

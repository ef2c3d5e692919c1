"""What this node holds of the model's state, and gives to peers: once, or kept up with step by step."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from dtfm.node.bucket import Bucket
from dtfm.protos.frame import Header, Kind, frames
from dtfm.protos.peer_pb2 import StateRequest

NORM = struct.Struct("<d")
"""How an update begins: the global gradient norm of its step."""

MAX_BEHIND = 8
"""So many updates of one bucket may wait for a follower; one that is slower is let go."""


@dataclass(frozen=True, slots=True)
class Held:
    """State that a node has in memory: buckets by index, as of after ``step``."""

    step: int
    buckets: Mapping[int, Bucket]


class Follower:
    """A peer's subscription to some buckets: their state first, then the updates of every later step. On one event loop."""

    def __init__(self, holding: Holding, buckets: Collection[int], loop: asyncio.AbstractEventLoop) -> None:
        self._holding = holding
        self._loop = loop
        self._to_send = deque(sorted(set(buckets)))
        self._updates: dict[int, deque[tuple[int, memoryview]]] = {
            i: deque() for i in self._to_send
        }  # steps, by bucket
        self._newest = 0
        self._news = asyncio.Event()
        self._ended = ""
        self.has: set[int] = set()
        """Buckets whose state is on its way: their updates must follow. Guarded by the holding's lock."""

    def put(self, step: int, updates: Mapping[int, memoryview]) -> None:
        """From any thread: ``step`` was applied, with these updates by bucket."""
        self._loop.call_soon_threadsafe(self._put, step, updates)

    def end(self, why: str) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._end, why)

    async def frames(self) -> AsyncIterator[bytes]:
        """What to send, without end: each bucket's state, then its updates, which go before the state of further buckets.
        Raises LookupError when there is nothing more to follow here."""
        state: Iterator[bytes] = iter(())
        sending: int | None = None  # the bucket whose state is on its way
        while not self._ended:
            self._news.clear()
            if (index := next((i for i, queue in self._updates.items() if queue and i != sending), None)) is not None:
                step, data = self._updates[index].popleft()
                for frame in frames(
                    Header(Kind.UPDATE, 0, 0, 0, step, index, self._newest, len(data), len(data)), data
                ):
                    yield frame
            elif (piece := next(state, None)) is not None:
                yield piece
            elif self._to_send:
                sending = self._to_send.popleft()
                header, data = await asyncio.to_thread(self._holding.begin, self, sending)
                self._newest = max(self._newest, header.step)
                state = frames(header, data)
            elif sending is not None:
                sending = None
            else:
                await self._news.wait()
        raise LookupError(self._ended)

    def close(self) -> None:
        self._holding.forget(self)

    def _put(self, step: int, updates: Mapping[int, memoryview]) -> None:
        self._newest = step
        for index, data in updates.items():
            self._updates[index].append((step, data))
            if len(self._updates[index]) > MAX_BEHIND:
                self._end(f"TOO_SLOW: {MAX_BEHIND} updates of bucket {index} wait; steps are quicker than this link")
        self._news.set()

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._news.set()


class Holding:
    """The state of this node's buckets. One thread trains on them and changes them, others read what peers ask for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = Held(0, {})
        self._followers: list[Follower] = []

    @property
    def held(self) -> Held:
        return self._held

    def replace(self, held: Held) -> None:
        """What is held from now on. Who follows a bucket that is no longer among it, or of another past, is let go."""
        with self._lock:
            kept = held.buckets.keys() if held.step == self._held.step else ()
            self._held = held
            for follower in [f for f in self._followers if not f.has <= set(kept)]:
                self._followers.remove(follower)
                follower.end(f"NOT_HELD: of the buckets {sorted(follower.has)} some are no longer held here")

    def apply(self, step: int, gradient_norm: float, update: Callable[[], None]) -> None:
        """``update`` changes the held buckets to their state as of after ``step``, by their gradients, which followers get.
        Should it fail half-way, what is left is of no use to anybody, and is not held any more."""
        with self._lock:
            buckets, self._held = self._held.buckets, Held(step, {})
            followed = {index for follower in self._followers for index in follower.has}
            updates = {index: _update(gradient_norm, buckets[index]) for index in followed}
            update()
            self._held = Held(step, buckets)
            for follower in self._followers:
                follower.put(step, {index: updates[index] for index in follower.has})

    def follow(self, buckets: Collection[int]) -> Follower:
        """On the event loop on which it is read. Raises LookupError for a bucket that is not held here."""
        with self._lock:
            if missing := sorted(set(buckets) - self._held.buckets.keys()):
                raise LookupError(f"NOT_HELD: buckets {missing} are not held here, but {sorted(self._held.buckets)}")
            follower = Follower(self, buckets, asyncio.get_running_loop())
            self._followers.append(follower)
            return follower

    def forget(self, follower: Follower) -> None:
        with self._lock:
            if follower in self._followers:
                self._followers.remove(follower)

    def begin(self, follower: Follower, bucket: int) -> tuple[Header, memoryview]:
        """A copy of a bucket's state as it is now; the follower gets its updates from the next step on. Raises LookupError."""
        with self._lock:
            follower.has.add(bucket)
            return self._copy(bucket, 0, 0)

    def donate(self, request: StateRequest) -> tuple[Header, memoryview]:
        """The asked-for bucket's state as of the asked-for step, from the asked-for byte on, copied. Raises LookupError saying
        what is held instead."""
        with self._lock:
            if self._held.step != request.step:
                raise LookupError(
                    f"NOT_HELD: state as of step {request.step} is not held here, but of {self._held.step}"
                )
            return self._copy(request.bucket, request.offset, request.generation)

    def _copy(self, bucket: int, offset: int, generation: int) -> tuple[Header, memoryview]:
        if bucket not in self._held.buckets:
            raise LookupError(f"NOT_HELD: bucket {bucket} is not held here, but {sorted(self._held.buckets)}")
        pieces = []
        for piece in self._held.buckets[bucket].export():
            pieces.append(piece[min(offset, len(piece)) :])
            offset -= min(offset, len(piece))
        state = b"".join(pieces)
        step = self._held.step
        header = Header(Kind.STATE, 0, 0, generation, step, bucket, step, len(state), len(state))
        return header, memoryview(state)


def _update(gradient_norm: float, bucket: Bucket) -> memoryview:
    gradients = bucket.gradients.detach().cpu().view(torch.uint8).numpy()
    return memoryview(b"".join((NORM.pack(gradient_norm), gradients.data)))

"""The nodes' open streams. Nodes' messages go into one queue of inputs; each stream has a small share of it. Messages to nodes
wait in a queue for each stream."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc.aio

from dtfm.coordinator.core import transition as t
from dtfm.protos import control_pb2 as wire
from dtfm.protos.token_bucket import TokenBucket

MOST_UNREAD, MOST_UNREAD_BYTES = 10_000, 16 << 20
"""The most that may wait for a slow reader: messages, and bytes, or a single message that is larger."""

MOST_INPUTS, MOST_INPUT_BYTES = 16, 1 << 20
"""The most of one stream's messages that may wait for the core. Above that, the stream is not read until there is room, so that
HTTP/2 stops the sender. A message that is larger than all of this waits alone."""
MOST_WAITING_BYTES = 64 << 20
"""The most bytes for all streams together."""

MESSAGES_PER_SECOND, MESSAGES_AT_ONCE = 500.0, 2500.0
BYTES_PER_SECOND, BYTES_AT_ONCE = float(1 << 20), float(16 << 20)
"""The limits of one stream: the lasting rate, and the most in a burst. A stream above them is read more slowly. A node sends a
handful of messages at each step."""

EVENTS_PER_SECOND, EVENTS_AT_ONCE = 2.0, 1000.0
"""The events in the log that one party's messages may cause: the lasting rate, and the most in a burst. All its messages on all
its streams count, one after the other or at the same time. A party above them is not heard until it is below."""

LAST_WORDS_SECONDS = 1.0
"""How long a stream that ends waits for the node to read its earlier messages."""


class Inputs:
    """The inputs for the core, in order. The coordinator's own inputs are limited by the work that it has begun."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[tuple[t.Input, Place | None, int]] = asyncio.Queue()
        self._crowded_out: set[Place] = set()  # streams that wait for room among all inputs
        self._bytes = 0

    def put_nowait(self, event: t.Input) -> None:
        self._waiting.put_nowait((event, None, 0))

    async def put_from(self, place: Place, event: t.Input, size: int) -> None:
        """Waits until there is room for ``size`` bytes more of this stream's. To be awaited once at a time for each place."""
        while not (place.has_room(size) and self._has_room(size)):
            if place.has_room(size):
                self._crowded_out.add(place)
            place.room.clear()
            await place.room.wait()
        place.count += 1
        place.bytes += size
        self._bytes += size
        self._waiting.put_nowait((event, place, size))

    def _has_room(self, size: int) -> bool:
        return not self._bytes or self._bytes + size <= MOST_WAITING_BYTES

    async def get(self) -> t.Input:
        event, place, size = await self._waiting.get()
        if place is not None:
            place.count -= 1
            place.bytes -= size
            self._bytes -= size
            place.room.set()
            for waiting in self._crowded_out:
                waiting.room.set()
            self._crowded_out.clear()
        return event


class Place:
    """How much of one stream waits."""

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0
        self.room = asyncio.Event()

    def has_room(self, size: int) -> bool:
        return not self.count or (self.count < MOST_INPUTS and self.bytes + size <= MOST_INPUT_BYTES)


class _Outgoing:
    """The messages to one node, in order. ``ended`` is set when nothing more will follow."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._waiting: asyncio.Queue[wire.CoordinatorMessage | None] = asyncio.Queue()
        self._bytes = 0

    def put(self, message: wire.CoordinatorMessage | None) -> None:
        """Adds a message. None ends the stream, after the earlier messages. A message too many also ends it: the node does not
        read."""
        size = 0 if message is None else message.ByteSize()
        if message is not None and not self._has_room(size):
            message, size = None, 0
            while not self._waiting.empty():
                self._waiting.get_nowait()
            self._bytes = 0
        self._bytes += size
        self._waiting.put_nowait(message)
        if message is None:
            self.ended.set()

    def _has_room(self, size: int) -> bool:
        waiting = self._waiting.qsize()
        return not waiting or (waiting < MOST_UNREAD and self._bytes + size <= MOST_UNREAD_BYTES)

    async def write_all(self, write: Callable[[wire.CoordinatorMessage], Awaitable[None]]) -> None:
        while (message := await self._waiting.get()) is not None:
            self._bytes -= message.ByteSize()
            await write(message)


class Streams:
    """Streams are numbered from 1. A stream whose first message does not come within ``first_message_seconds`` is refused.
    ``party`` returns the party of a name."""

    def __init__(
        self, inputs: Inputs, first_message_seconds: float, party: Callable[[str], str] = lambda name: name
    ) -> None:
        self._inputs = inputs
        self._party = party
        self._events: dict[str, TokenBucket] = {}  # by party; only of enrolled ones
        self._pays: dict[int, TokenBucket] = {}  # by stream, until its end has been taken in
        self._first_message_seconds = first_message_seconds
        self._numbers = itertools.count(1)
        self._outgoing: dict[int, _Outgoing] = {}

    @property
    def any_open(self) -> bool:
        return bool(self._outgoing)

    async def serve(
        self,
        requests: AsyncIterator[wire.NodeMessage],
        write: Callable[[wire.CoordinatorMessage], Awaitable[None]],
        caller: str,
        seen: str = "",
    ) -> None:
        """Serves one stream, which ``caller`` has opened, from its first message to its end. ``seen``: the address of the
        caller (see Greeted)."""
        stream = next(self._numbers)
        outgoing = self._outgoing[stream] = _Outgoing()
        events = self._events.setdefault(self._party(caller), TokenBucket(EVENTS_PER_SECOND, EVENTS_AT_ONCE))
        self._pays[stream] = events
        reader = asyncio.create_task(self._read(stream, requests, caller, seen))
        writer = asyncio.create_task(outgoing.write_all(write))
        ended = asyncio.create_task(outgoing.ended.wait())
        try:
            await asyncio.wait({writer, ended}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({writer}, timeout=LAST_WORDS_SECONDS)
            if writer.done():
                await writer
        finally:
            for task in (reader, writer, ended):
                task.cancel()
            del self._outgoing[stream]
            self._inputs.put_nowait(t.StreamClosed(stream, "its connection broke"))

    def put(self, stream: int, message: wire.CoordinatorMessage | None) -> None:
        """Sends the message. None ends the stream after the earlier messages. A stream that has ended is ignored."""
        if (outgoing := self._outgoing.get(stream)) is not None:
            outgoing.put(message)

    def logged(self, said: t.Greeted | t.Heard | t.StreamClosed, events: int) -> None:
        """Charges the stream's party for the ``events`` that its message ``said`` has put into the log."""
        if (pays := self._pays.get(said.stream)) is not None:
            pays.draw(time.monotonic(), events)
            if isinstance(said, t.StreamClosed):
                del self._pays[said.stream]

    async def _solvent(self, stream: int) -> None:
        """Waits until the stream's party may put events into the log again."""
        pause = self._pays[stream].draw(time.monotonic(), 0.0)
        if pause:
            await asyncio.sleep(pause)
            await self._solvent(stream)  # others of the party may have sent more since

    async def _read(self, stream: int, requests: AsyncIterator[wire.NodeMessage], caller: str, seen: str) -> None:
        reason, place = "it closed its stream", Place()
        said, size = TokenBucket(MESSAGES_PER_SECOND, MESSAGES_AT_ONCE), TokenBucket(BYTES_PER_SECOND, BYTES_AT_ONCE)
        try:
            first = await asyncio.wait_for(anext(requests, None), self._first_message_seconds)
            first = first or wire.NodeMessage()
            await self._solvent(stream)
            await self._inputs.put_from(place, t.Greeted(stream, first, caller, seen), first.ByteSize())
            async for message in requests:
                if pause := max(said.draw(now := time.monotonic()), size.draw(now, message.ByteSize())):
                    await asyncio.sleep(pause)
                await self._solvent(stream)
                await self._inputs.put_from(place, t.Heard(stream, message), message.ByteSize())
        except TimeoutError:
            self._inputs.put_nowait(t.Greeted(stream, wire.NodeMessage(), caller))
            return  # it is refused, and hung up on
        except grpc.aio.AioRpcError as error:
            reason = f"its connection broke ({error.code().name})"
        except Exception as error:
            reason = f"its connection broke ({type(error).__name__})"
        self._inputs.put_nowait(t.StreamClosed(stream, reason))
        self.put(stream, None)

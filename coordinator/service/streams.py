"""The nodes' open streams: what nodes say goes into one queue of inputs, what they are told waits in a queue for each stream."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc.aio

from dtfm.coordinator.core import transition as t
from dtfm.protos import control_pb2 as wire

MAX_WAITING = 10_000
"""The number of messages that may wait for a slow reader, in either direction."""


LAST_WORDS_SECONDS = 1.0
"""How long a stream that ends waits for the node to read what it was told before."""


class _Outgoing:
    """What one node is told, in order. ``ended`` is set once nothing more will follow."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._waiting: asyncio.Queue[wire.CoordinatorMessage | None] = asyncio.Queue(MAX_WAITING)

    def put(self, message: wire.CoordinatorMessage | None) -> None:
        """None ends it, after what was put before; so does a message too many, as the node does not read."""
        try:
            self._waiting.put_nowait(message)
        except asyncio.QueueFull:
            message = None
            while not self._waiting.empty():
                self._waiting.get_nowait()
            self._waiting.put_nowait(None)
        if message is None:
            self.ended.set()

    async def write_all(self, write: Callable[[wire.CoordinatorMessage], Awaitable[None]]) -> None:
        while (message := await self._waiting.get()) is not None:
            await write(message)


class Streams:
    """Streams are numbered from 1. A stream whose first message does not come within ``first_message_seconds`` is refused."""

    def __init__(self, inputs: asyncio.Queue[t.Input], first_message_seconds: float) -> None:
        self._inputs = inputs
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
        """Serves one stream, which ``caller`` has opened, from its first message to its end. ``seen``: the address from which it
        comes (see Greeted)."""
        stream = next(self._numbers)
        outgoing = self._outgoing[stream] = _Outgoing()
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
            await self._inputs.put(t.StreamClosed(stream, "its connection broke"))

    def put(self, stream: int, message: wire.CoordinatorMessage | None) -> None:
        """Sends the message; None ends the stream after what was sent before. A stream that has ended is ignored."""
        if (outgoing := self._outgoing.get(stream)) is not None:
            outgoing.put(message)

    async def _read(self, stream: int, requests: AsyncIterator[wire.NodeMessage], caller: str, seen: str) -> None:
        reason = "it closed its stream"
        try:
            first = await asyncio.wait_for(anext(requests, None), self._first_message_seconds)
            await self._inputs.put(t.Greeted(stream, first or wire.NodeMessage(), caller, seen))
            async for message in requests:
                await self._inputs.put(t.Heard(stream, message))
        except TimeoutError:
            await self._inputs.put(t.Greeted(stream, wire.NodeMessage(), caller))
            return  # it is refused, and hung up on
        except grpc.aio.AioRpcError as error:
            reason = f"its connection broke ({error.code().name})"
        except Exception as error:
            reason = f"its connection broke ({type(error).__name__})"
        await self._inputs.put(t.StreamClosed(stream, reason))
        self.put(stream, None)

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


class Streams:
    """Streams are numbered from 1. A stream whose first message does not come within ``first_message_seconds`` is refused."""

    def __init__(self, inputs: asyncio.Queue[t.Input], first_message_seconds: float) -> None:
        self._inputs = inputs
        self._first_message_seconds = first_message_seconds
        self._numbers = itertools.count(1)
        self._outgoing: dict[int, asyncio.Queue[wire.CoordinatorMessage | None]] = {}

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
        outgoing = self._outgoing[stream] = asyncio.Queue(MAX_WAITING)
        reader = asyncio.create_task(self._read(stream, requests, caller, seen))
        try:
            while (message := await outgoing.get()) is not None:
                await write(message)
        finally:
            reader.cancel()
            del self._outgoing[stream]
            await self._inputs.put(t.StreamClosed(stream, "its connection broke"))

    def put(self, stream: int, message: wire.CoordinatorMessage | None) -> None:
        """Sends the message; None ends the stream after what was sent before. A stream that has ended is ignored."""
        if (outgoing := self._outgoing.get(stream)) is None:
            return
        try:
            outgoing.put_nowait(message)
        except asyncio.QueueFull:  # the node does not read: its stream ends, and its membership with it
            while not outgoing.empty():
                outgoing.get_nowait()
            outgoing.put_nowait(None)

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

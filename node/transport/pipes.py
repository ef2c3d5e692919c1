"""Bytes both ways, over a socket or over a call of gRPC, and two of them joined."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc.aio

PIECE = 256 << 10
"""The most bytes that are read at once. So much waits in each direction of a joined pair, beside what gRPC and the kernel
hold."""


class PipeBroken(Exception):
    """The other side is gone, for the reason in the text."""


class Pipe(Protocol):
    async def read(self) -> bytes:
        """Some bytes; none at the end. Raises PipeBroken."""
        ...

    async def write(self, data: bytes) -> None:
        """Returns when there is room for more. Raises PipeBroken."""
        ...

    def close(self) -> None: ...


class SocketPipe:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """``reader`` should be made with the limit PIECE."""
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes:
        try:
            return await self._reader.read(PIECE)
        except OSError as error:
            raise PipeBroken(str(error)) from error

    async def write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise PipeBroken(str(error)) from error

    def close(self) -> None:
        self._writer.close()


class CallPipe:
    """The calling side of a stream of bytes both ways. ``channel`` is closed with it."""

    def __init__(self, call: Any, channel: grpc.aio.Channel | None = None) -> None:
        self._call = call
        self._channel = channel
        self._closing: asyncio.Task[None] | None = None

    async def read(self) -> bytes:
        try:
            piece = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise _broken(error) from error
        return b"" if piece is grpc.aio.EOF else bytes(piece)

    async def write(self, data: bytes) -> None:
        try:
            await self._call.write(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise _broken(error) from error

    def close(self) -> None:
        self._call.cancel()
        if self._channel is not None and self._closing is None:
            self._closing = asyncio.create_task(self._channel.close())


class ServedPipe:
    """The called side of a stream of bytes both ways. ``closed`` is set when its user has closed it; the call may end then."""

    def __init__(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self._requests = requests
        self._context = context
        self.closed = asyncio.Event()

    async def read(self) -> bytes:
        try:
            return await anext(self._requests, b"")
        except Exception as error:  # gRPC does not say which ones come once a call has ended
            raise _broken(error) from error

    async def write(self, data: bytes) -> None:
        try:
            await self._context.write(data)
        except Exception as error:
            raise _broken(error) from error

    def close(self) -> None:
        self.closed.set()


async def join(one: Pipe, other: Pipe) -> None:
    """Passes on what either says to the other until one of them ends, then closes both."""

    async def pass_on(source: Pipe, destination: Pipe) -> None:
        with contextlib.suppress(PipeBroken):
            while data := await source.read():
                await destination.write(data)

    tasks = [asyncio.create_task(pass_on(one, other)), asyncio.create_task(pass_on(other, one))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        one.close()
        other.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _broken(error: BaseException) -> PipeBroken:
    if isinstance(error, grpc.aio.AioRpcError):
        return PipeBroken(f"{error.code().name}: {error.details()}")
    return PipeBroken(str(error) or type(error).__name__)

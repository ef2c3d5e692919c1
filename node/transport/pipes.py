"""Bytes both ways, over a socket or over a call of gRPC, and two of them joined."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio

PIECE = 256 << 10
"""The most bytes that are read at once. So much waits in each direction of a joined pair, beside what gRPC and the kernel
hold."""


@dataclass(frozen=True, eq=False)
class Pipe:
    """``read`` returns some bytes, and none at the end; ``write`` returns when there is room for more. Both raise an exception of
    the socket's or of gRPC's when the other side is gone."""

    read: Callable[[], Awaitable[bytes]]
    write: Callable[[bytes], Awaitable[object]]
    close: Callable[[], object]


def socket_pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Pipe:
    """``reader`` should be made with the limit PIECE."""

    async def write(data: bytes) -> None:
        writer.write(data)
        await writer.drain()

    return Pipe(lambda: reader.read(PIECE), write, writer.close)


def call_pipe(call: Any, channel: grpc.aio.Channel | None = None) -> Pipe:
    """The calling side of a stream of bytes both ways. ``channel`` is closed with it."""
    closing: list[asyncio.Task[None]] = []

    async def read() -> bytes:
        piece = await call.read()
        return b"" if piece is grpc.aio.EOF else bytes(piece)

    def close() -> None:
        call.cancel()
        if channel is not None and not closing:
            closing.append(asyncio.create_task(channel.close()))

    return Pipe(read, call.write, close)


def served_pipe(
    requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
) -> tuple[Pipe, asyncio.Event]:
    """The called side of a stream of bytes both ways, and an event: its user has closed it, and the call may end."""
    closed = asyncio.Event()

    async def read() -> bytes:
        return await anext(requests, b"")

    return Pipe(read, lambda data: context.write(data), closed.set), closed


def read_ahead(pipe: Pipe) -> tuple[Pipe, asyncio.Future[bytes]]:
    """The pipe, and its first bytes, which are read from now on: they come from the pipe as well."""
    first = asyncio.ensure_future(pipe.read())
    first.add_done_callback(lambda read: read.cancelled() or read.exception())  # nobody may ever read it
    unread = [first]

    async def read() -> bytes:
        return await (unread.pop() if unread else pipe.read())

    return replace(pipe, read=read), first


async def join(one: Pipe, other: Pipe) -> None:
    """Passes on what either says to the other until one of them ends, then closes both."""

    async def pass_on(source: Pipe, destination: Pipe) -> None:
        with contextlib.suppress(Exception):  # gRPC does not say which ones come once a call has ended
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

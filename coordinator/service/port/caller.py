"""A caller's connection through the coordinator's port: the caller's socket, and the one to gRPC's server, joined.

Until a call is let in, the caller is a stranger, with few bytes and little time. Its bytes reach gRPC only if they begin TLS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Protocol

from dtfm.protos.candidates import Address, origin_of

HELLO_SECONDS = 5.0
STRANGER_SECONDS = 15.0
"""Both count from the connection on. A distant caller (a round trip of half a second) needs two or three seconds until a call
is let in."""
MOST_STRANGE_BYTES = 16 << 10
"""TLS's greeting has at most 2 KiB, a call's headers with its token as much, the largest request of a stranger 4."""
_TLS_HEAD = 6


class Door(Protocol):
    """Connects callers with gRPC's server."""

    def run(self, work: Coroutine[object, object, None]) -> None: ...
    async def pass_on(self, caller: Caller) -> None: ...
    def ended(self, caller: Caller) -> None: ...


class _Side(asyncio.Protocol):
    """One of two sockets that are joined. Each side passes on the other's bytes, no faster than they are read."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Side = self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        if self.other.transport is not None:
            self.other.transport.close()


class _Inner(_Side):
    """The side of gRPC's server."""

    def __init__(self, caller: Caller) -> None:
        super().__init__()
        self._caller = self.other = caller

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._caller.joined()


class Caller(_Side):
    """The caller's side: a stranger until a call on it shows a ``key`` that is let in. ``peer`` is the name that gRPC's server
    has for it."""

    def __init__(self, door: Door, address: Address) -> None:
        super().__init__()
        self.address = address
        self.origin = origin_of(address)
        self.key = ""
        self.peer = ""
        self.calls = 0
        self.over = asyncio.Event()
        self.inner = self.other = _Inner(self)
        self._door = door
        self._heard = 0
        self._first = b""
        self._deadline: asyncio.TimerHandle | None = None
        self._passed_on = False
        self._is_cut_off = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._is_cut_off:
            self.cut_off()
        else:
            self._end_after(HELLO_SECONDS)

    def data_received(self, data: bytes) -> None:
        if not self.key:
            self._heard += len(data)
            if self._heard > MOST_STRANGE_BYTES:
                self.cut_off()
                return
        if self.inner.transport is not None:
            super().data_received(data)
            return
        self._first += data
        if not _may_be_tls(self._first):
            self.cut_off()
        elif not self._passed_on and len(self._first) >= _TLS_HEAD:
            self._passed_on = True
            self._end_after(STRANGER_SECONDS - HELLO_SECONDS)
            self._door.run(self._door.pass_on(self))

    def joined(self) -> None:
        """From now on gRPC's server gets the caller's bytes."""
        assert self.inner.transport is not None
        if self.over.is_set():
            self.inner.transport.abort()
        else:
            self.inner.transport.write(self._first)
            self._first = b""

    def no_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def cut_off(self) -> None:
        self._is_cut_off = True
        for side in (self, self.inner):
            if side.transport is not None:
                side.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.over.set()
        self.no_deadline()
        self._door.ended(self)
        super().connection_lost(error)

    def _end_after(self, seconds: float) -> None:
        self.no_deadline()
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.cut_off)


def _may_be_tls(first: bytes) -> bool:
    """Whether these bytes can begin TLS: with a handshake record (22), version 3.x, that begins with a ClientHello (1); RFC
    8446, 4 and 5.1."""
    return all(first[at : at + 1] in (b"", wanted) for at, wanted in ((0, b"\x16"), (1, b"\x03"), (5, b"\x01")))

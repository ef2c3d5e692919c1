"""Opens the sockets for multicast DNS, on local networks alone."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from zeroconf import IPVersion
from zeroconf.asyncio import AsyncZeroconf

from dtfm.protos.local_network.announcement import is_local
from dtfm.protos.token_bucket import TokenBucket

MOST_BYTES = 9000
"""Of a packet (RFC 6762, section 17)."""
MOST_PACKETS, PACKETS_PER_SECOND = 2000.0, 1000.0
"""The packets that are read, of all senders together."""
MOST_OF_ONE, OF_ONE_PER_SECOND = 100.0, 10.0
"""The same of one sender: whoever sends much more keeps nobody else from being heard."""
MOST_SENDERS = 1000
"""The number of senders that are told apart. Further ones count as one."""
BUFFER_BYTES = 1 << 20
"""For packets that wait to be read, if the system gives as much."""
CLOSE_SECONDS = 2.0
"""The longest wait for the goodbye."""

Reader = Callable[[bytes, str], None]
"""Takes a packet, and the address that it came from."""


@asynccontextmanager
async def multicast(hosts: Sequence[str], read: Callable[[Reader], Reader]) -> AsyncIterator[AsyncZeroconf]:
    """Opens sockets for multicast DNS on the interfaces with the addresses ``hosts``. Raises OSError if that fails.

    ``read`` takes the library's way to read a packet, and returns what reads each packet instead. Before that, packets are
    dropped that are too large, too many, or from elsewhere: the library's socket hears the internet, too.
    """
    logging.getLogger("zeroconf").setLevel(logging.CRITICAL)  # what matters of its warnings is raised here
    version = IPVersion.All if any(":" in host for host in hosts) else IPVersion.V4Only
    try:
        opened = AsyncZeroconf(interfaces=list(hosts), ip_version=version)
    except (OSError, ValueError, RuntimeError) as problem:
        why = getattr(problem, "strerror", None) or problem
        raise OSError(f"UDP port 5353, for multicast DNS, cannot be used here ({why})") from problem
    try:
        await opened.zeroconf.async_wait_for_start()
        if not opened.zeroconf.engine.senders:
            raise OSError("no network interface here passes multicast on")
        for reader in opened.zeroconf.engine.readers:
            library = reader.transport.get_protocol()
            reader.transport.set_protocol(Nearby(library, read))
            with suppress(OSError):
                reader.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        yield opened
    finally:
        with suppress(Exception):
            async with asyncio.timeout(CLOSE_SECONDS):
                await opened.async_close()


class Nearby(asyncio.DatagramProtocol):
    """Passes on packets from the local network, a bounded number in all and of each sender."""

    def __init__(self, library: Any, read: Callable[[Reader], Reader]) -> None:
        self._library = library
        self._all = TokenBucket(PACKETS_PER_SECOND, MOST_PACKETS)
        self._senders: dict[str, TokenBucket] = {}
        self._sender: tuple[str, int] = ("", 0)
        self._read = read(lambda packet, _: library.datagram_received(packet, self._sender))

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if self._is_read(data, addr[0], asyncio.get_running_loop().time()):
            self._sender = addr
            self._read(data, addr[0])

    def _is_read(self, data: bytes, host: str, now: float) -> bool:
        if len(data) > MOST_BYTES:
            return False
        if (its := self._senders.get(host)) is None:
            if not is_local(host):
                return False
            who = host if len(self._senders) < MOST_SENDERS else ""
            its = self._senders.setdefault(who, TokenBucket(OF_ONE_PER_SECOND, MOST_OF_ONE))
        return its.take(now) and self._all.take(now)

    def error_received(self, exc: Exception) -> None:
        self._library.error_received(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self._library.connection_lost(exc)

"""Opens the sockets for multicast DNS, on local networks alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from zeroconf import IPVersion
from zeroconf.asyncio import AsyncZeroconf

from dtfm.protos.local_network.announcement import is_local
from dtfm.protos.token_bucket import TokenBucket

MOST_BYTES = 9000
"""Of a packet (RFC 6762, section 17)."""
CLOSE_SECONDS = 2.0
"""The longest wait for the goodbye."""

Reader = Callable[[bytes, str], None]
"""Takes a packet, and the address that it came from."""


@asynccontextmanager
async def multicast(
    hosts: Sequence[str], budget: TokenBucket, read: Callable[[Reader], Reader]
) -> AsyncIterator[AsyncZeroconf]:
    """Opens sockets for multicast DNS on the interfaces with the addresses ``hosts``. Raises OSError if that fails.

    ``read`` takes the library's way to read a packet, and returns what reads each packet instead. Before that, packets are
    dropped that are too large, beyond the ``budget``, or from elsewhere: the library's socket hears the internet, too.
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
            reader.transport.set_protocol(Nearby(library, budget, read))
        yield opened
    finally:
        with suppress(Exception):
            async with asyncio.timeout(CLOSE_SECONDS):
                await opened.async_close()


class Nearby(asyncio.DatagramProtocol):
    """Passes on packets from the local network, as long as the budget lasts."""

    def __init__(self, library: Any, budget: TokenBucket, read: Callable[[Reader], Reader]) -> None:
        self._library = library
        self._budget = budget
        self._sender: tuple[str, int] = ("", 0)
        self._read = read(lambda packet, _: library.datagram_received(packet, self._sender))

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        host = addr[0]
        near = len(data) <= MOST_BYTES and is_local(host)
        if near and self._budget.take(asyncio.get_running_loop().time()):
            self._sender = addr
            self._read(data, host)

    def error_received(self, exc: Exception) -> None:
        self._library.error_received(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self._library.connection_lost(exc)

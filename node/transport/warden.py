"""Keeps strangers from filling the node's port: each address has few connections without a call.

gRPC's server bounds the time of a handshake and the number of connections, but not the number from one address. A
front, like the coordinator's, would copy every tensor once more. So this looks at the process's own sockets once enough files are
open to keep members out. It shuts down some of the connections without a call, where most of them come from: gRPC then sees
them end. Fewer are left alone, as they cost next to nothing until the handshake's time is over. A member that is shut out comes
back immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from ipaddress import ip_address

from dtfm.protos.candidates import origin_of, plain, seen_at
from dtfm.protos.connection import MOST_CONNECTIONS
from dtfm.protos.open_files import raise_limit

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
CROWDED = MOST_CONNECTIONS * 3 // 4
"""Files. With fewer open there is nothing to look at."""
LEFT = MOST_CONNECTIONS // 2
"""Connections that may stay then."""
MOST_OF_ONE = 64
"""Connections of one address, or of one household's IPv6, that are not shut down."""
MOST_CALLED = 4096
"""The number of members' connections to remember before closed ones are forgotten."""


class Warden:
    """``called`` has the connections on which a member has called, as gRPC names them (context.peer()); closed ones are
    taken out of it."""

    def __init__(self, port: int, called: set[str]) -> None:
        self._port = port
        self._called = called
        files = raise_limit()
        self._crowded, self._left = min(CROWDED, files * 3 // 4), min(LEFT, files // 2)
        self._since: dict[str, float] = {}  # when a stranger's connection was seen first
        self._task = asyncio.create_task(self._watch())

    def close(self) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with contextlib.suppress(OSError):
                if len(os.listdir("/dev/fd")) >= self._crowded or len(self._called) > MOST_CALLED:
                    self.look()

    def look(self) -> None:
        """Shuts down the surplus: of the addresses with most connections, those seen first."""
        now, present = time.monotonic(), set()
        strangers: defaultdict[str, list[tuple[float, str, socket.socket]]] = defaultdict(list)
        seen = {}
        with contextlib.ExitStack() as stack:
            for peer, connection in self._connections():
                stack.callback(connection.close)
                present.add(peer)
                if peer not in self._called:
                    seen[peer] = since = self._since.get(peer, now)
                    if (address := seen_at(peer)) is not None:
                        strangers[origin_of(address)].append((since, peer, connection))
            self._since = seen
            self._called &= present
            excess = len(present) - self._left
            for origin, theirs in sorted(strangers.items(), key=lambda each: len(each[1]), reverse=True):
                theirs.sort(key=lambda each: each[0])
                too_many = theirs[: max(0, min(excess, len(theirs) - MOST_OF_ONE))]
                excess -= len(too_many)
                if too_many:
                    log.info("%d connections from %s are shut down: nobody has called on them", len(too_many), origin)
                for _, _, connection in too_many:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)

    def _connections(self) -> Iterator[tuple[str, socket.socket]]:
        """The connections to the port, each by the name that gRPC gives it. Each is to be closed, which does not end it."""
        for entry in os.listdir("/dev/fd"):
            try:
                copy = os.dup(int(entry))  # so that it stays what it is while it is looked at
            except OSError:
                continue  # closed by now
            try:
                connection = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)  # no socket
                continue
            try:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == self._port:
                    host, port = connection.getpeername()[:2]
                    yield _peer(host, port), connection
                    continue
            except OSError:
                pass  # not connected
            connection.close()


def _peer(host: str, port: int) -> str:
    """What gRPC calls it."""
    address = plain(ip_address(host.partition("%")[0]))
    return f"ipv4:{address}:{port}" if address.version == 4 else f"ipv6:%5B{host}%5D:{port}"

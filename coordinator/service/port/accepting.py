"""Takes connections from a socket that strangers reach. Refused connections cost little."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable
from ipaddress import ip_address

from dtfm.protos.candidates import Address, plain

log = logging.getLogger(__name__)

BACKLOG = 1024
ACCEPTED_AT_ONCE = 64
"""The number of connections to take before the open ones get their turn."""
PAUSE_SECONDS = 1.0
"""The pause when the system has no files left to give."""
REFUSED_PAUSE_SECONDS = 0.02
"""The pause after strangers were refused. While many come they are refused by the dozen, which costs less than waking up for
each."""
_RESET = struct.pack("ii", 1, 0)

Take = Callable[[socket.socket, Address], bool]
"""Returns whether the connection, from this address, is kept. The callee has to close a kept connection."""


class Accepting:
    """Gives each connection of ``listening`` to ``take``, in a ``loop`` of asyncio, and resets the refused ones."""

    def __init__(self, loop: asyncio.AbstractEventLoop, listening: socket.socket, take: Take) -> None:
        self._loop = loop
        self._listening = listening
        self._take = take
        self._over = False
        listening.setblocking(False)

    def begin(self) -> None:
        """Begins to accept. Call all methods in the loop's thread."""
        if not self._over:
            self._loop.add_reader(self._listening, self.accept)

    def end(self) -> None:
        """Stops accepting. The socket stays open."""
        self._over = True
        self._loop.remove_reader(self._listening)

    def accept(self) -> None:
        refused = False
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, where = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                break
            except OSError as error:
                log.warning("no connection can be taken for %.0f s: %s", PAUSE_SECONDS, error)
                self._pause(PAUSE_SECONDS)
                return
            if not self._take(accepted, plain(ip_address(where[0].partition("%")[0]))):
                # A reset leaves nothing behind, neither here nor in the system.
                with contextlib.suppress(OSError):
                    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                accepted.close()
                refused = True
        if refused:
            self._pause(REFUSED_PAUSE_SECONDS)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listening)
        self._loop.call_later(seconds, self.begin)

"""Ports for processes that end and come back to the same one."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress

_NUMBERS = itertools.count()
FIRST, PAST_LAST = 10_000, 32_000


def free_port(together: int = 1) -> int:
    """The first of this many free ports in a row.

    They lie below the ports of outgoing connections. Otherwise, while their owner is away, another process may get one for its
    own end of a connection, and keep it from the owner when it returns.
    """
    for number in _NUMBERS:
        port = FIRST + (os.getpid() * 101 + number * together) % (PAST_LAST - FIRST - together)
        with suppress(OSError):
            for each in range(port, port + together):
                socket.create_server(("127.0.0.1", each)).close()
            return port
    raise AssertionError

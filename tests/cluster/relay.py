"""A TCP relay that records all its traffic, and may be slow."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from types import TracebackType
from typing import Self


class Relay:
    """``with Relay(port) as relay``: a connection to ``relay.port`` is relayed to ``port``, both on loopback. ``heard``: the
    bytes that have passed, in two entries per connection, one for each direction. ``rate``: the most bytes per second in each
    direction."""

    def __init__(self, port: int, rate: float = math.inf) -> None:
        self._to = ("127.0.0.1", port)
        self._rate = rate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.heard: list[bytearray] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._to)
                except OSError:  # nobody listens there now
                    near.close()
                    continue
                for source, destination in ((near, far), (far, near)):
                    self.heard.append(bytearray())
                    arguments = (source, destination, self.heard[-1], self._rate)
                    threading.Thread(target=_carry, args=arguments, daemon=True).start()


def _carry(source: socket.socket, destination: socket.socket, heard: bytearray, rate: float) -> None:
    free = 0.0
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 14):
            free = max(free, time.monotonic()) + len(data) / rate
            heard += data
            time.sleep(max(0.0, free - time.monotonic()))
            destination.sendall(data)
    for end in (source, destination):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

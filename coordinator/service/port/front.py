"""The coordinator's port. The front passes bytes on to gRPC's server, over a socket that only this user can reach.

gRPC's server cannot tell a member's connection from a stranger's before a call is made on the connection. Until then it limits
neither the connections of an address nor their bytes. So the front limits them. Until a call on it is let in, a stranger's
connection has HELLO_SECONDS for the first bytes of TLS, STRANGER_SECONDS in all, MOST_STRANGE_BYTES and MOST_STRANGE_CALLS. It
is one of few of its origin (strangers.py). It reaches gRPC only after it has begun with TLS. gRPC and streams.py limit a
member's bytes.

The front has a thread of its own, so that connections stay alive while the coordinator is busy, and the other way round.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from pathlib import Path

from dtfm.coordinator.service.port.accepting import BACKLOG, Accepting
from dtfm.coordinator.service.port.caller import Caller
from dtfm.coordinator.service.port.strangers import Limits, Strangers
from dtfm.protos.candidates import Address

log = logging.getLogger(__name__)

MOST_STRANGE_CALLS = 4
"""A call costs more than its bytes. A newcomer makes one or two until it is let in, or refused."""
MOST_OF_A_KEY = 128
"""Connections that the members of one key may have open at a time. A machine has a key, and may have 32 members."""
CLOSING_SECONDS = 0.5
"""How long the last bytes of gRPC's server may take, after the server has ended."""
GONE_MILLISECONDS = 20_000
"""A connection is dead if its other side acknowledges nothing for this time. gRPC has the same limit on its own sockets."""

_FOLDER = "dtfm-front-"
_SOCKET = "grpc"
_MOST_PARENT_BYTES = 70
"""The longest path for the folder's parent. A Unix socket's path may have 103 bytes on the strictest system (macOS). The
folder's name (19) and a connection's number follow the parent."""


class Front:
    """Listens in place of gRPC's server, which listens at ``inner``. ``members``: origins of former members."""

    def __init__(self, limits: Limits, members: Iterable[str] = ()) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=_parent()))  # of mode 0700
        self.inner = f"unix:{self._folder / _SOCKET}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="front", daemon=True)
        self._sockets: list[socket.socket] = []
        self._accepting: list[Accepting] = []
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._lock = threading.Lock()  # guards the fields below
        self._strangers = Strangers[Caller](limits, members)
        self._most_of_members = limits.members
        self._passed_on: dict[str, Caller] = {}
        self._open: set[Caller] = set()
        self._keys: Counter[str] = Counter()  # how many connections members have, by key

    def bind(self, host: str, port: int) -> int:
        """Takes the port (0: one that the system chooses), and returns it. Raises OSError."""
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(infos):
            listening = socket.socket(family, kind, protocol)
            self._sockets.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            listening.bind((address[0], port, *address[2:]))
            listening.listen(BACKLOG)
            self._accepting.append(Accepting(self._loop, listening, self._come))
            port = listening.getsockname()[1]
        return port

    def start(self) -> None:
        """Begins to take connections. gRPC's server must listen."""
        self._thread.start()
        for each in self._accepting:
            self._loop.call_soon_threadsafe(each.begin)

    async def close(self) -> None:
        """Frees the port, and ends all connections. gRPC's server must have ended. May be called several times, also at the
        same time."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._thread.is_alive():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._end(), self._loop))
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join)
        for listening in self._sockets:
            listening.close()
        self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def has_died(self) -> bool:
        """Whether it has stopped taking connections, though nobody has closed it."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def seen(self, peer: str) -> Address | None:
        """The address of the caller that gRPC's server sees as ``peer`` (context.peer()). None: the caller is gone."""
        with self._lock:
            caller = self._passed_on.get(peer)
        return None if caller is None else caller.address

    def let_in(self, peer: str, key: str) -> bool:
        """Call it when a member with this key has made a call on the connection that gRPC's server sees as ``peer``: the caller
        is no stranger. Returns False if this key, or all members together, have too many connections."""
        with self._lock:
            caller = self._passed_on.get(peer)
            if caller is None or caller.key:
                return True
            if self._keys[key] >= MOST_OF_A_KEY or self._keys.total() >= self._most_of_members:
                return False
            self._keys[key] += 1
            self._strangers.let_in(caller, caller.origin, key, time.monotonic())
            caller.key = key
        self._loop.call_soon_threadsafe(caller.no_deadline)
        return True

    def called(self, peer: str) -> None:
        """Notes a call on the connection that gRPC's server sees as ``peer``."""
        with self._lock:
            caller = self._passed_on.get(peer)
            if caller is None or caller.key:
                return
            caller.calls += 1
            if caller.calls <= MOST_STRANGE_CALLS:
                return
        self._loop.call_soon_threadsafe(caller.cut_off)

    def _come(self, accepted: socket.socket, address: Address) -> bool:
        """Whether the connection is kept."""
        caller = Caller(self, address)
        with self._lock:
            taken = self._strangers.come(caller, caller.origin, time.monotonic())
        if taken is None:
            return False
        for other in taken:
            other.cut_off()
        try:
            accepted.setblocking(False)
            _notice_death(accepted)
        except OSError:  # it has ended already
            with self._lock:
                self._strangers.go(caller)
            return False
        with self._lock:
            self._open.add(caller)
        self.run(self._take(caller, accepted))
        return True

    async def _take(self, caller: Caller, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: caller, accepted)
        except OSError:
            accepted.close()
            self.ended(caller)

    def run(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def pass_on(self, caller: Caller) -> None:
        """Connects the caller with gRPC's server."""
        inner = socket.socket(socket.AF_UNIX)
        try:
            inner.setblocking(False)
            path = self._folder / str(next(self._numbers))
            inner.bind(str(path))  # gRPC's server sees it under this name
            caller.peer = f"unix:{path}"
            with self._lock:
                self._passed_on[caller.peer] = caller
            try:
                await self._loop.sock_connect(inner, str(self._folder / _SOCKET))
            finally:
                path.unlink(missing_ok=True)
            await self._loop.create_connection(lambda: caller.inner, sock=inner)
        except OSError as error:  # gRPC's server has ended, or is behind with accepting
            log.info("a connection could not be passed on: %s", error)
            inner.close()
            caller.cut_off()

    def ended(self, caller: Caller) -> None:
        with self._lock:
            self._open.discard(caller)
            self._passed_on.pop(caller.peer, None)
            if caller.key:
                self._keys[caller.key] -= 1
                if not self._keys[caller.key]:
                    del self._keys[caller.key]
            else:
                self._strangers.go(caller)

    async def _end(self) -> None:
        for each in self._accepting:
            each.end()
        callers = list(self._open)
        for caller in callers:
            if caller.key:
                self._loop.call_later(CLOSING_SECONDS, caller.cut_off)
            else:
                caller.cut_off()
        await asyncio.gather(*(caller.over.wait() for caller in callers), *self._tasks - {asyncio.current_task()})


def _notice_death(accepted: socket.socket) -> None:
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_MILLISECONDS)


def _parent() -> str:
    """The folder for temporary files, unless its path is too long for a socket's."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _MOST_PARENT_BYTES else "/tmp"

"""Connections to the page's port and to the metrics' port, which share a thread with the run.

Connections are limited by their origin and in all. When a viewer's link is shown on a connection, its link's limit counts
instead. A connection beyond a limit is reset before anything is made for it. A request has HEAD_SECONDS to come, and its answer
ANSWER_SECONDS to be read. After that, a silent caller loses the place.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dtfm.coordinator.service.port.accepting import Accepting
from dtfm.coordinator.service.port.strangers import Limits, Strangers
from dtfm.coordinator.web.app import LASTS
from dtfm.coordinator.web.door import LET_IN
from dtfm.protos.candidates import Address, origin_of

MOST_STRANGERS, MOST_OF_AN_ORIGIN = 64, 32
"""The most connections from elsewhere until a link is shown on them: of all origins, and of one."""
MOST_FROM_HERE = 128
"""The most connections to a page on loopback: from this machine's users, or from a proxy."""
MOST_GUESTS, MOST_OF_A_LINK = 256, 32
"""The most connections with a viewer's link: of all links, and of one. A browser makes about six."""
RATE_FROM_HERE = 64.0
STRANGER_SECONDS = 10.0
"""The longest time that a connection from elsewhere lasts until a viewer's link is shown on it: Prometheus waits no longer."""
HEAD_SECONDS = 10.0
"""The longest time for a request to come, from the connection or from the answer before it."""
ANSWER_SECONDS = 60.0
"""The longest time from a request's head to the end of its answer, unless that is a stream of events."""


def limits_within(files: int, *, from_anywhere: bool) -> Limits:
    """The limits for a process that may have this number of ``files`` open. Pages and metrics together take an eighth of them,
    or a little more."""
    if from_anywhere:
        most = min(MOST_STRANGERS, files // 64)
        return Limits(open_of_one=min(MOST_OF_AN_ORIGIN, most), open=most, members=min(MOST_GUESTS, files // 16))
    most = min(MOST_FROM_HERE, files // 32)
    rate = {"rate_of_one": RATE_FROM_HERE, "rate": RATE_FROM_HERE}
    return Limits(open_of_one=most, open=most, members=min(MOST_GUESTS, files // 16), **rate)


class Visit:
    """A connection, which is counted before anything is made for it. ``link``: the invitation's id of the viewer's link that
    the caller has shown; empty: none."""

    __slots__ = ("caller", "link", "origin")

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.link = ""
        self.caller: Caller | None = None

    def cut_off(self) -> None:
        if self.caller is not None:
            self.caller.cut_off()


class Callers:
    """The callers that are connected to the port. ``from_anywhere``: strangers may reach the port, so a connection is short
    until a link is shown on it."""

    def __init__(self, limits: Limits, *, from_anywhere: bool) -> None:
        self.strangers = Strangers[Visit](limits)
        self.from_anywhere = from_anywhere
        self._most_guests = limits.members
        self._guests = Counter[str]()  # the number of connections, by the link that was shown on them

    def let_in(self, visit: Visit, link: str) -> bool:
        """Notes that the caller has shown ``link``, by its invitation's id. Returns whether the link may have one connection
        more, and all links together."""
        if visit.link:
            return True
        if self._guests[link] >= MOST_OF_A_LINK or self._guests.total() >= self._most_guests:
            return False
        self._guests[link] += 1
        visit.link = link
        self.strangers.let_in(visit, visit.origin, link, time.monotonic())
        return True

    def go(self, visit: Visit) -> None:
        """The connection has ended."""
        self.strangers.go(visit)
        if visit.link:
            self._guests[visit.link] -= 1
            self._guests += Counter()  # drops zeros


class Caller(H11Protocol):
    """One connection's protocol."""

    def __init__(self, callers: Callers, visit: Visit, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._callers = callers
        self._visit = visit
        self._deadline: asyncio.TimerHandle | None = None  # of the next thing that is due
        self._end: asyncio.TimerHandle | None = None  # of a stranger's connection from elsewhere
        self._is_cut_off = False
        app = self.app

        async def asked(scope: Any, receive: Any, send: Any) -> None:
            self._within(ANSWER_SECONDS)
            await app({**scope, LET_IN: self._let_in, LASTS: self._no_deadline}, receive, send)

        self.app = asked

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._is_cut_off:
            transport.abort()
            return
        self._within(HEAD_SECONDS)
        if self._callers.from_anywhere:
            self._end = asyncio.get_running_loop().call_later(STRANGER_SECONDS, self.cut_off)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._within(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._no_deadline()
        if self._end is not None:
            self._end.cancel()
        self._callers.go(self._visit)
        super().connection_lost(exc)

    def cut_off(self) -> None:
        self._is_cut_off = True
        if self.transport is not None:
            self.transport.abort()

    def _let_in(self, link: str) -> bool:
        """See Callers.let_in."""
        if not self._callers.let_in(self._visit, link):
            return False
        if self._end is not None:
            self._end.cancel()
        return True

    def _no_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _within(self, seconds: float) -> None:
        self._no_deadline()
        if self.transport is not None and not self.transport.is_closing():
            self._deadline = asyncio.get_running_loop().call_later(seconds, self.cut_off)


class PageServer(uvicorn.Server):
    """Serves the callers of ``listening``, and closes it at the end."""

    def __init__(self, config: uvicorn.Config, listening: socket.socket, callers: Callers) -> None:
        super().__init__(config)
        self._listening = listening
        self._callers = callers
        self._accepting: Accepting | None = None  # until it serves
        self._tasks = set[asyncio.Task[None]]()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: signals are the coordinator's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._accepting = Accepting(asyncio.get_running_loop(), self._listening, self._come)
        self._accepting.begin()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            self._accepting.end()
        self._listening.close()
        await super().shutdown(sockets)

    def _come(self, accepted: socket.socket, address: Address) -> bool:
        """Whether the connection is kept."""
        visit = Visit(origin_of(address))
        taken = self._callers.strangers.come(visit, visit.origin, time.monotonic())
        if taken is None:
            return False
        for other in taken:
            other.cut_off()
        state, passed = self.server_state, self.lifespan.state
        visit.caller = caller = Caller(self._callers, visit, config=self.config, server_state=state, app_state=passed)
        task = asyncio.get_running_loop().create_task(self._take(visit, caller, accepted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _take(self, visit: Visit, caller: Caller, accepted: socket.socket) -> None:
        try:
            accepted.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: caller, accepted)
        except OSError:  # it has ended already
            accepted.close()
            self._callers.go(visit)

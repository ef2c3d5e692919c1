"""Serving the page beside the coordinator, in its event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from dtfm.coordinator.service.addresses import public_addresses
from dtfm.coordinator.service.strangers import Limits, Strangers
from dtfm.coordinator.web import DEFAULT_PAGE
from dtfm.coordinator.web.app import HEADERS, HOSTS, MOST_VIEWERS
from dtfm.coordinator.web.door import LET_IN
from dtfm.protos.candidates import origin_of, plain
from dtfm.protos.connection import address_of, read_address

log = logging.getLogger(__name__)

STRANGERS = Limits(open_of_one=32, open=64)
"""Connections to a port that strangers may reach."""
STRANGER_SECONDS = 10.0
"""The longest time that such a connection lasts, until a viewer's link is shown on it: Prometheus waits no longer."""


class StrangersProtocol(H11Protocol):
    """A connection from anywhere: one of few, and short, unless a viewer's link is shown on it."""

    def __init__(self, strangers: Strangers[StrangersProtocol], **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._strangers = strangers
        app = self.app

        async def known(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, LET_IN: self._let_in}, receive, send)

        self.app = known

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        host = self.client[0] if self.client is not None else "::"  # it has ended already
        self._origin = origin_of(plain(ip_address(host.partition("%")[0])))
        self._end = asyncio.get_running_loop().call_later(STRANGER_SECONDS, transport.abort)
        taken = self._strangers.come(self, self._origin, time.monotonic())
        if taken is None:
            transport.abort()
        for other in taken or ():
            other.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        self._strangers.go(self)
        super().connection_lost(exc)

    def _let_in(self, invitation: str) -> None:
        if not self._end.cancelled():
            self._end.cancel()
            self._strangers.let_in(self, self._origin, invitation, time.monotonic())


class PageServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the coordinator's."""
        yield


def bind_page(address: str) -> socket.socket:
    """A socket that listens on HOST:PORT; empty: on DEFAULT_PAGE, or on another port where that one is taken. Raises
    ValueError."""
    if address:
        return bind(address, "--web", ", or --no-page")
    host, port = read_address(DEFAULT_PAGE)
    try:
        return _listening(host, port)
    except OSError:
        return _listening(host, 0)


def bind(address: str, option: str, instead: str = "") -> socket.socket:
    """A socket that listens on HOST:PORT, which the ``option`` gave; ``instead``: what else could be given. Raises ValueError."""
    host, port = read_address(address)
    try:
        return _listening(host, port)
    except OSError as error:
        ports = "choose another port (port 0: any free one)"
        raise ValueError(f"{option} {address}: cannot listen there ({error.strerror}); {ports}{instead}") from None


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")


def link_to(listening: socket.socket) -> str:
    """What a person opens."""
    return f"http://127.0.0.1:{listening.getsockname()[1]}/"


def read_page_url(text: str) -> str:
    """``text`` with a slash at its end; empty stays empty. Raises ValueError."""
    parts = urlsplit(text)
    if text and (parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment):
        raise ValueError(f"--page-url {text!r} is not where a page is; give it like https://run.example.org/")
    return text and text.removesuffix("/") + "/"


def url_elsewhere(listening: socket.socket, given: str, hosts: Sequence[str]) -> str:
    """Where others open the page that is served there: ``given``, or at the first of these ``hosts``, if any, or of this
    machine's addresses; empty: nowhere, as it is on loopback."""
    host, port = listening.getsockname()[:2]
    if given or host in HOSTS:
        return given
    return f"http://{public_addresses(host, port, [address_of(each, port) for each in hosts])[0]}/"


@asynccontextmanager
async def page_served(
    listening: socket.socket | None, app: Starlette, *, from_anywhere: bool = False
) -> AsyncIterator[None]:
    """Serves the ``app`` on this socket, which uvicorn closes at the end; without a socket, does nothing. ``from_anywhere``:
    strangers may reach it, and nothing before it bounds their connections."""
    if listening is None:
        yield
        return
    config = uvicorn.Config(
        app,
        http=partial(StrangersProtocol, Strangers[StrangersProtocol](STRANGERS)) if from_anywhere else H11Protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        headers=HEADERS,
        limit_concurrency=4 * MOST_VIEWERS + 2 * STRANGERS.open,
        timeout_graceful_shutdown=1,
    )
    server = PageServer(config)
    serving = asyncio.create_task(server.serve([listening]))
    serving.add_done_callback(_say_why)
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.wait([serving])


def _say_why(ended: asyncio.Task[None]) -> None:
    if not ended.cancelled() and (error := ended.exception()) is not None:
        log.error("the page is served no more; the run goes on", exc_info=error)

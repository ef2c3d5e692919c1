"""Serving the page beside the coordinator, in its event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dtfm.coordinator.view.follower import Follower
from dtfm.coordinator.web import DEFAULT_PAGE
from dtfm.coordinator.web.app import HEADERS, HOSTS, MOST_VIEWERS, make_app, make_metrics_app
from dtfm.protos.connection import read_address

log = logging.getLogger(__name__)

MOST_SCRAPERS = 16
"""The number of connections to the port of the metrics, which strangers may reach. The others are closed."""
SCRAPE_SECONDS = 10.0
"""The longest time that such a connection lasts: Prometheus waits no longer for an answer."""


class ScraperProtocol(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end = asyncio.get_running_loop().call_later(SCRAPE_SECONDS, transport.abort)
        if len(self.connections) > MOST_SCRAPERS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        super().connection_lost(exc)


class PageServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the coordinator's."""
        yield


def bind_page(address: str) -> socket.socket:
    """A socket that listens on HOST:PORT; empty: on DEFAULT_PAGE, or on another port where that one is taken. Raises
    ValueError."""
    host, port = read_address(address or DEFAULT_PAGE)
    if host not in HOSTS:
        raise ValueError(
            f"--web {address}: the page has no password, so it listens on {' or '.join(HOSTS)} alone. Use --web "
            f"127.0.0.1:{port}, and on the machine with the browser: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE"
        )
    try:
        return socket.create_server((host, port))
    except OSError as error:
        if not address:
            return socket.create_server((host, 0))
        raise _taken(f"--web {address}", error, ", or --no-page") from None


def bind_metrics(address: str) -> socket.socket:
    """A socket that listens on HOST:PORT. Raises ValueError."""
    host, port = read_address(address)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise _taken(f"--metrics {address}", error) from None


def _taken(option: str, error: OSError, instead: str = "") -> ValueError:
    ports = "choose another port (port 0: any free one)"
    return ValueError(f"{option}: cannot listen there ({error.strerror}); {ports}{instead}")


def link_to(listening: socket.socket) -> str:
    """What a person opens."""
    return f"http://127.0.0.1:{listening.getsockname()[1]}/"


@asynccontextmanager
async def page_served(
    listening: socket.socket | None, follower: Follower, *, metrics_alone: bool = False
) -> AsyncIterator[None]:
    """Serves what ``follower`` tells on this socket, which uvicorn closes at the end; without a socket, does nothing."""
    if listening is None:
        yield
        return
    config = uvicorn.Config(
        make_metrics_app(follower) if metrics_alone else make_app(follower),
        http=ScraperProtocol if metrics_alone else H11Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        headers=HEADERS,
        limit_concurrency=4 * MOST_VIEWERS,
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

"""Serving the page beside the coordinator, in its event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from dtfm.coordinator.view.follower import Follower
from dtfm.coordinator.web import DEFAULT_PAGE
from dtfm.coordinator.web.app import HEADERS, HOSTS, MOST_VIEWERS, make_app
from dtfm.protos.connection import read_address

log = logging.getLogger(__name__)


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
        raise ValueError(
            f"--web {address}: cannot listen there ({error.strerror}); choose another port (port 0: any free one), or --no-page"
        ) from None


def link_to(listening: socket.socket) -> str:
    """What a person opens."""
    return f"http://127.0.0.1:{listening.getsockname()[1]}/"


@asynccontextmanager
async def page_served(listening: socket.socket | None, follower: Follower) -> AsyncIterator[None]:
    """Serves what ``follower`` tells on this socket, which uvicorn closes at the end; without a socket, does nothing."""
    if listening is None:
        yield
        return
    config = uvicorn.Config(
        make_app(follower),
        http="h11",
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

"""Serves the page beside the coordinator, in the coordinator's event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette

from dtfm.coordinator.service.addresses import public_addresses
from dtfm.coordinator.web import DEFAULT_PAGE
from dtfm.coordinator.web.app import HEADERS, is_here
from dtfm.coordinator.web.callers import Callers, PageServer, limits_within
from dtfm.protos.connection import address_of, read_address
from dtfm.protos.open_files import raise_limit

log = logging.getLogger(__name__)


def bind_page(address: str) -> socket.socket:
    """A socket that listens on HOST:PORT. Empty: on DEFAULT_PAGE, or on another port if that one is taken. Raises ValueError."""
    if address:
        return bind(address, "--web", ", or --no-page")
    host, port = read_address(DEFAULT_PAGE)
    try:
        return _listening(host, port)
    except OSError:
        return _listening(host, 0)


def bind(address: str, option: str, instead: str = "") -> socket.socket:
    """A socket that listens on HOST:PORT, the value of ``option``. ``instead``: another value that could be given. Raises
    ValueError."""
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
    """The URL for a person to open."""
    host, port = listening.getsockname()[:2]
    return f"http://{address_of(host if is_here(host) else '127.0.0.1', port)}/"


def read_page_url(text: str) -> str:
    """``text`` with a slash at its end; empty stays empty. Raises ValueError."""
    parts = urlsplit(text)
    if text and (parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment):
        raise ValueError(f"--page-url {text!r} is not where a page is; give it like https://run.example.org/")
    return text and text.removesuffix("/") + "/"


def url_elsewhere(listening: socket.socket, given: str, hosts: Sequence[str]) -> str:
    """The URL where others open the page that is served there: ``given``, or with the first of ``hosts``, or of this machine's
    addresses. Empty: nowhere, because the page is on loopback."""
    host, port = listening.getsockname()[:2]
    if given or is_here(host):
        return given
    return f"http://{public_addresses(host, port, [address_of(each, port) for each in hosts])[0]}/"


@asynccontextmanager
async def page_served(
    listening: socket.socket | None, app: Starlette, *, from_anywhere: bool = False
) -> AsyncIterator[None]:
    """Serves the ``app`` on this socket, and closes the socket at the end. Without a socket, does nothing. ``from_anywhere``:
    strangers may reach the socket, and nothing before it limits their connections."""
    if listening is None:
        yield
        return
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        headers=HEADERS,
        timeout_graceful_shutdown=1,
    )
    callers = Callers(limits_within(raise_limit(), from_anywhere=from_anywhere), from_anywhere=from_anywhere)
    serving = asyncio.create_task((server := PageServer(config, listening, callers)).serve())
    serving.add_done_callback(_say_why)
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.wait([serving])


def _say_why(ended: asyncio.Task[None]) -> None:
    if not ended.cancelled() and (error := ended.exception()) is not None:
        log.error("the page has stopped; the run goes on", exc_info=error)

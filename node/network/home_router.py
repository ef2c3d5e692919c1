"""A port that the home router is asked to open for this node, by UPnP-IGD (the package miniupnpc).

The router is asked for an hour at a time, and to close the port when the node ends: a machine that vanishes leaves no door open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

from dtfm.protos.candidates import way_to
from dtfm.protos.connection import address_of

log = logging.getLogger(__name__)

DISCOVERY_MS = 500
"""How long routers may take to answer who they are."""
PATIENCE_SECONDS = 3.0
"""Most seconds for finding the router and opening the port together: nobody waits for a slow router."""
LIFETIME_SECONDS = 3600


class HomeRouter:
    """``make`` returns the same as miniupnpc.UPnP()."""

    def __init__(self, make: Callable[[], Any] | None = None) -> None:
        self._make = make or _miniupnpc
        self._router: Any = None
        self._port = 0
        self._renewing: asyncio.Task[None] | None = None

    async def open(self, port: int) -> str:
        """Has the router lead a port of its public address to this machine's ``port``, until ``close``. Returns the candidate.
        Empty if there is no such router, or the router refuses."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                candidate = await asyncio.to_thread(self._open, port)
        except Exception as error:  # miniupnpc raises plain ones
            log.info(
                "no router opened port %d: %s", port, str(error) or f"none has answered in {PATIENCE_SECONDS:.0f} s"
            )
            return ""
        self._renewing = asyncio.create_task(self._renew(port))
        return candidate

    async def close(self) -> None:
        """Has the router close the port."""
        if self._renewing is None:
            return
        self._renewing.cancel()
        self._renewing = None
        with contextlib.suppress(Exception):  # it will close the port by itself, within LIFETIME_SECONDS
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asyncio.to_thread(self._router.deleteportmapping, self._port, "TCP")

    def _open(self, port: int) -> str:
        router = self._make()
        router.discoverdelay = DISCOVERY_MS
        if not router.discover():
            raise OSError("none has answered")
        router.selectigd()
        public = ip_address(router.externalipaddress())
        if way_to(public) != "public":
            raise OSError(f"its own address, {public}, is not public: the provider does NAT too")
        self._router, self._port = router, port
        self._map(port)
        return address_of(public, port)

    def _map(self, port: int) -> None:
        router = self._router
        if not router.addportmapping(port, "TCP", router.lanaddr, port, "dtfm", "", LIFETIME_SECONDS):
            raise OSError("it refused")

    async def _renew(self, port: int) -> None:
        while True:
            await asyncio.sleep(LIFETIME_SECONDS / 2)
            try:
                await asyncio.to_thread(self._map, port)
            except Exception as error:
                log.warning("the router does not keep port %d open: %s", port, error)


def _miniupnpc() -> Any:
    """Raises ImportError where the package is not installed."""
    import miniupnpc

    return miniupnpc.UPnP()

"""Coordinators that announce themselves on the local network (see protos/announcement.py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from zeroconf import ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from dtfm.protos.announcement import SERVICE, Announcement, read_announcement

log = logging.getLogger(__name__)

LOOK_SECONDS = 4.0
"""Questions go out at once, and after one and three seconds (RFC 6762 section 5.2)."""
MOST_FOUND = 16
"""Announcements that are looked at."""


async def look_around(heard: Callable[[Announcement], None], zeroconf: AsyncZeroconf | None = None) -> None:
    """Calls ``heard`` with each announcement that comes within LOOK_SECONDS. Raises OSError where there is no multicast."""
    asked: dict[str, asyncio.Task[None]] = {}
    asking = zeroconf or AsyncZeroconf()

    async def ask(name: str) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        if not await info.async_request(asking.zeroconf, LOOK_SECONDS * 1000):
            return
        try:
            heard(read_announcement(info.properties, info.parsed_addresses(), info.port))
        except ValueError as problem:
            log.debug("passed over an announcement: %s", problem)

    def changed(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is not ServiceStateChange.Removed and name not in asked and len(asked) < MOST_FOUND:
            asked[name] = asyncio.create_task(ask(name))

    browser = AsyncServiceBrowser(asking.zeroconf, SERVICE, handlers=[changed])
    try:
        await asyncio.sleep(LOOK_SECONDS)
    finally:
        for task in asked.values():
            task.cancel()
        await browser.async_cancel()
        with contextlib.suppress(Exception):
            await asking.async_close()

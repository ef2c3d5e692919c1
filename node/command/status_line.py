"""Shows a line that changes: in its place on a terminal, otherwise now and then in the log."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from dtfm.protos.printable import JsonFormatter

log = logging.getLogger(__name__)

EVERY_SECONDS = 10.0
"""Seconds between two lines."""
SAME_SECONDS = 60.0
"""Seconds until an unchanged line is repeated."""
REFRESH_SECONDS = 1.0  # on a terminal


@asynccontextmanager
async def status_line(line: Callable[[], str]) -> AsyncIterator[None]:
    """A context that shows the result of ``line``, unless it is empty; and once more at the end."""
    as_json = any(isinstance(handler.formatter, JsonFormatter) for handler in logging.root.handlers)
    showing = asyncio.create_task(_live(line) if sys.stdout.isatty() and not as_json else _lines(line))
    try:
        yield
    finally:
        showing.cancel()
        with suppress(asyncio.CancelledError):
            await showing


async def _lines(line: Callable[[], str]) -> None:
    said, at = "", time.monotonic()
    try:
        while True:
            now = line()
            if now and (now != said or time.monotonic() - at >= SAME_SECONDS):
                said, at = now, time.monotonic()
                log.info("%s", said)
            await asyncio.sleep(EVERY_SECONDS)
    finally:
        if (last := line()) != said:
            log.info("%s", last)


async def _live(line: Callable[[], str]) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(), auto_refresh=False) as live:  # what else is printed goes above the line
        try:
            while True:
                live.update(Text(line()), refresh=True)
                await asyncio.sleep(REFRESH_SECONDS)
        finally:
            live.update(Text(line()))

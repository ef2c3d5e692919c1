"""Which of this node's streams goes first where they share a link: what the pipeline waits for, then what replicas exchange,
then state."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time

PATIENCE = 4.0
"""A stream gives way for so many times as long as its last piece took: so it keeps a fifth of even the busiest link."""


class Rank(enum.IntEnum):
    """Of two that wait for a link the smaller goes first."""

    PIPELINE = 0
    REDUCTION = 1
    STATE = 2


class Uplink:
    """What waits to leave this node, by link and rank. Used on one event loop; a link is named by the peer at its end.

    What a socket has taken cannot be overtaken any more. So nothing is gained where links to several peers share a line for
    a while, as they do behind a home's router: their sockets' buffers go on sending (measured: 16 MiB beside 31 MiB to another
    peer came hardly sooner, and over lines that were not shared the others came later).
    """

    def __init__(self) -> None:
        self._waiting: set[tuple[str, Rank]] = set()
        self._changed = asyncio.Event()

    def occupy(self, link: str, rank: Rank) -> None:
        """From now on something waits to be written, or is being written."""
        self._waiting.add((link, rank))

    def vacate(self, link: str, rank: Rank) -> None:
        self._waiting.discard((link, rank))
        self._changed.set()

    async def give_way(self, rank: Rank, seconds: float, link: str | None = None) -> None:
        """After a piece that took ``seconds`` to be written: returns when the next one may be, which is when nothing of a
        smaller rank waits for ``link`` (None: for any), but at the latest after PATIENCE times as long."""

        def must_wait() -> bool:
            return any(ahead < rank and link in (None, other) for other, ahead in self._waiting)

        until = time.monotonic() + PATIENCE * seconds
        while must_wait() and (left := until - time.monotonic()) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

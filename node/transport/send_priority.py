"""The order in which this node's streams use a link: the pipeline first, then the replicas' tensors, then state."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time

PATIENCE = 4.0
"""A stream gives way for at most this many times as long as its last piece took, so it keeps a fifth of the busiest link."""


class Rank(enum.IntEnum):
    """A smaller rank goes first."""

    PIPELINE = 0
    REDUCTION = 1
    STATE = 2


class SendPriority:
    """The waiting streams, by link and rank; a link is named by the peer at its end. Lives on one event loop.

    Bytes that a socket has taken cannot be overtaken. So this does not help links that share a line, as behind a home router:
    the other sockets' buffers go on sending. Measured: 16 MiB sent beside 31 MiB to another peer arrived hardly sooner, and
    on lines that were not shared the other streams arrived later.
    """

    def __init__(self) -> None:
        self._waiting: set[tuple[str, Rank]] = set()
        self._changed = asyncio.Event()

    def occupy(self, link: str, rank: Rank) -> None:
        """Something now waits to be written or is being written."""
        self._waiting.add((link, rank))

    def vacate(self, link: str, rank: Rank) -> None:
        """Nothing waits any more."""
        self._waiting.discard((link, rank))
        self._changed.set()

    async def give_way(self, rank: Rank, seconds: float, link: str | None = None) -> None:
        """To be called after a piece that took ``seconds`` to write; returns when the next one may be written.

        That is when nothing of a smaller rank waits for ``link`` (None: for any), but at most PATIENCE times ``seconds`` later.
        """

        def must_wait() -> bool:
            return any(ahead < rank and link in (None, other) for other, ahead in self._waiting)

        until = time.monotonic() + PATIENCE * seconds
        while must_wait() and (left := until - time.monotonic()) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

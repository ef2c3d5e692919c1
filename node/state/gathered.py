"""What arrives piece by piece on the event loop and is taken in a thread: copied to a device, digested, or written to a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TAKEN_AT_ONCE = 1 << 20
"""The number of bytes for which the way to a thread and back is worth while."""

Take = Callable[[memoryview, int], None]
"""Gets a piece of the whole and its offset in bytes."""


class Gathered:
    """Bytes in the order of the whole. ``take`` gets them in a thread, TAKEN_AT_ONCE or more at a time."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._pieces = bytearray()
        self._taken = 0

    @property
    def have(self) -> int:
        """The number of bytes that have arrived."""
        return self._taken + len(self._pieces)

    async def add(self, piece: memoryview) -> None:
        self._pieces += piece
        if len(self._pieces) >= TAKEN_AT_ONCE:
            await self.flush()

    async def flush(self) -> None:
        """Returns, also when cancelled, when all arrived bytes are taken: nothing is written behind the caller's back. Raises
        the errors of ``take``, even when cancelled: a caller that only timed out must not go on behind a hole."""
        if not self._pieces:
            return
        pieces, self._pieces = self._pieces, bytearray()
        taking = asyncio.ensure_future(asyncio.to_thread(self._take, memoryview(pieces), self._taken))
        cancelled: asyncio.CancelledError | None = None
        while not taking.done():
            try:
                await asyncio.wait([taking])
            except asyncio.CancelledError as again:
                cancelled = again
        taking.result()
        self._taken += len(pieces)
        if cancelled is not None:
            raise cancelled

    def begin_again(self) -> None:
        """The whole comes again, from its first byte."""
        self._pieces.clear()
        self._taken = 0

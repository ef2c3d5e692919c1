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
        """Returns, also when cancelled, when all that has arrived is taken: nothing is written behind the caller's back."""
        if not self._pieces:
            return
        pieces, offset = self._pieces, self._taken
        self._pieces, self._taken = bytearray(), offset + len(pieces)
        taking = asyncio.ensure_future(asyncio.to_thread(self._take, memoryview(pieces), offset))
        try:
            await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.wait([taking])
            raise

    def begin_again(self) -> None:
        """The whole comes again, from its first byte."""
        self._pieces.clear()
        self._taken = 0

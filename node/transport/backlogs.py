"""What one party sends through this node, and the other does not read yet, waits in this node's memory: a bounded part for each
key.

Each stream may have a window's bytes there, enough to fill the line of an honest member. So a key may have few streams at a time
that stand still.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import replace

from dtfm.node.transport.pipes import Pipe

log = logging.getLogger(__name__)

MOST_BEHIND = 16
"""Pipes of one key whose bytes wait. A member needs about four to each peer, and one or two of them are busy."""
SHORT_SECONDS = 0.05
"""Bytes that already wait are read in less. A destination that takes them in less is not behind."""


class Backlogs:
    """The pipes from which more comes than their destinations take, by key, the longest behind first."""

    def __init__(self) -> None:
        self._behind: defaultdict[str, dict[_Watch, None]] = defaultdict(dict)

    def watched(self, pipe: Pipe, key: str) -> Pipe:
        """The same pipe, to be read and closed in its place. Its bytes come from ``key``. If too many of the key's pipes are
        behind, the one that is behind for longest is closed."""
        watch = _Watch(self, pipe, key)
        return replace(pipe, read=watch.read, close=watch.close)

    def falls_behind(self, watch: _Watch) -> None:
        pipes = self._behind[watch.key]
        pipes.setdefault(watch)
        if len(pipes) > MOST_BEHIND:
            log.warning("%d connections of a key stand still; the oldest is closed", len(pipes))
            next(iter(pipes)).close()

    def catches_up(self, watch: _Watch) -> None:
        pipes = self._behind[watch.key]
        pipes.pop(watch, None)
        if not pipes:
            del self._behind[watch.key]


class _Watch:
    """A pipe is behind from when nobody asks for its next bytes, until it is asked and has none."""

    def __init__(self, backlogs: Backlogs, pipe: Pipe, key: str) -> None:
        self.key = key
        self._backlogs, self._pipe = backlogs, pipe
        self._asked: asyncio.TimerHandle | None = None
        self._closed = False

    async def read(self) -> bytes:
        loop = asyncio.get_running_loop()
        if self._asked is not None:
            self._asked.cancel()
        began = loop.time()
        data = await self._pipe.read()
        if loop.time() - began >= SHORT_SECONDS:
            self._backlogs.catches_up(self)
        if not self._closed:
            self._asked = loop.call_later(SHORT_SECONDS, self._backlogs.falls_behind, self)
        return data

    def close(self) -> None:
        self._closed = True
        if self._asked is not None:
            self._asked.cancel()
        self._backlogs.catches_up(self)
        self._pipe.close()

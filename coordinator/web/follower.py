"""Reads the log for the page, in a thread of its own: neither a long log nor many viewers delay a commit."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import time
from concurrent.futures import ThreadPoolExecutor

from dtfm.coordinator.log.record import Record, StoreError
from dtfm.coordinator.log.store import Store
from dtfm.coordinator.view.page import page_text
from dtfm.coordinator.view.story import Story

log = logging.getLogger(__name__)
SHORTEST_PAUSE = 0.25
"""Seconds between two looks at the log. What happens meanwhile is shown together."""
FRESH_SECONDS = 1.0
"""The present state is turned into a document at most this often; all viewers get the same one."""


class Follower:
    """The log as the page tells it, as far as it has been read. Its own thread alone touches the story."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._story = Story()
        self._thread = ThreadPoolExecutor(1, "page")
        self._written, self._read = asyncio.Event(), asyncio.Event()
        self._made: tuple[int, float, bytes] | None = None
        self.last = 0
        self.ended = asyncio.Event()
        """No more is read: whoever waits for news need not."""

    def wake(self, _record: Record) -> None:
        """There is something new in the log."""
        self._written.set()

    async def follow(self) -> None:
        """Reads the log, and then what is added to it, until it is cancelled."""
        try:
            while True:
                self._written.clear()
                if await self._more():
                    self.last = self._story.now.sequence
                    self._read.set()
                    self._read = asyncio.Event()
                else:
                    await self._written.wait()
                    await asyncio.sleep(SHORTEST_PAUSE)
        finally:
            self.ended.set()
            self._read.set()

    async def news(self, seconds: float) -> int:
        """The number of the newest event that was read, once there is another one, or after this time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._read.wait(), seconds)
        return self.last

    async def page(self, at: int | None) -> bytes:
        """The page's JSON, compressed by gzip, as of this event; None: as it is now. Raises StoreError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._page, at)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _more(self) -> bool:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._read_on)
        except StoreError as error:
            log.warning("the page cannot read the log, and tries again when there is more: %s", error)
            return False

    def _read_on(self) -> bool:
        page = self._store.page(self._story.now.sequence)
        for record in page:
            self._story.add(record)
        return bool(page)

    def _page(self, at: int | None) -> bytes:
        story, now = self._story, time.time()
        last = story.now.sequence
        if at is not None and at < last:
            then = story.at(at, self._store.read)
            return _compressed(page_text(then, story.history, self._store.last, then.last))
        if self._made is None or self._made[0] != last or now - self._made[1] > FRESH_SECONDS:
            self._made = (last, now, _compressed(page_text(story.now, story.history, self._store.last, now)))
        return self._made[2]


def _compressed(text: str) -> bytes:
    return gzip.compress(text.encode(), 4)

"""Writes the log: entries are written before anything is sent, and readers follow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dtfm.coordinator.log.events import Event
from dtfm.coordinator.store.record import AnotherWriter, Record, StoreError
from dtfm.coordinator.store.store import Store

log = logging.getLogger(__name__)
FIRST_PAUSE_SECONDS = 0.1
"""Seconds before a failed write is tried again; then twice as long each time."""
SAY_AGAIN_SECONDS = 60.0
"""After which it is said again that the log cannot be written."""
READERS_PAUSE_SECONDS = 0.25
"""Readers of the log are told this much later: nodes come first, and a reader may take as much work as a node."""

What = TypeVar("What")
Result = TypeVar("Result")


class LogWriter:
    """The store's only writer. It has a thread, so that a write waits for nothing else; a write goes on even if its caller is
    cancelled."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "log")
        self._listeners: set[Callable[[Record], None]] = set()
        self._appended = asyncio.Event()
        self._writing: set[asyncio.Future[Any]] = set()
        self._closed = False
        self.is_failing = False  # the last write failed, and is tried again

    def on_event(self, listener: Callable[[Record], None]) -> None:
        """Calls ``listener`` with every event from now on, when it is in the log."""
        self._listeners.add(listener)

    async def append(self, events: Sequence[Event]) -> None:
        """Writes the events durably. Raises StoreError. Does not raise an exception of a listener, which may print to a full
        disk."""
        for record in await self._write(self._store.append, events):
            for listener in self._listeners:
                try:
                    listener(record)
                except Exception:
                    log.exception("event %d could not be shown", record.sequence)
        self._appended.set()
        self._appended = asyncio.Event()

    async def append_however_long(self, events: Sequence[Event], longest: float, stopped: asyncio.Event) -> float:
        """Like ``append``, but tries again until the write succeeds, with pauses of at most ``longest`` seconds. Says each minute
        that the run waits. Returns the seconds since the first failure; 0: it succeeded the first time. Raises StoreError if
        another coordinator writes to the log, or when ``stopped`` is set."""
        pause, began, said = FIRST_PAUSE_SECONDS, 0.0, 0.0
        while True:
            try:
                await self.append(events)
            except AnotherWriter:
                raise
            except StoreError as error:
                if not self.is_failing:
                    began, self.is_failing = time.monotonic(), True
                if not said or time.monotonic() - said >= SAY_AGAIN_SECONDS:
                    said = time.monotonic()
                    log.error(
                        "the run stands still until the log can be written, and then goes on by itself: %s", error
                    )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopped.wait(), pause)
                if stopped.is_set():
                    raise
                pause = min(2 * pause, longest)
            else:
                if not self.is_failing:
                    return 0.0
                self.is_failing, lost = False, time.monotonic() - began
                log.info("the log can be written again; the run goes on after %.0f s", lost)
                return lost

    async def renew(self, seconds: float) -> None:
        """See `Store.renew`. Raises StoreError."""
        await self._write(self._store.renew, seconds)

    async def records(self, after: int, follow: bool) -> AsyncIterator[Record]:
        """The events with larger sequence numbers than ``after``; with ``follow``, later ones too. Raises StoreError."""
        while True:
            # asked before the page is read: what is written while it is read, the log's last events too, is in the next one
            appended, closed = self._appended, self._closed
            page = await asyncio.to_thread(self._store.page, after)
            for record in page:
                yield record
                after = record.sequence
            if page:
                continue
            if not follow or closed:
                return
            await appended.wait()
            if not self._closed:
                await asyncio.sleep(READERS_PAUSE_SECONDS)

    def let_follow(self, more: bool) -> None:
        """Whether events follow. If not, followers that have read all events end."""
        self._closed = not more
        if not more:
            self._appended.set()

    async def close(self) -> None:
        """Waits for writes in progress, and lets followers end."""
        self.let_follow(False)
        if self._writing:
            await asyncio.wait(self._writing)
        self._thread.shutdown(wait=False)

    async def _write(self, write: Callable[[What], Result], what: What) -> Result:
        writing = asyncio.get_running_loop().run_in_executor(self._thread, write, what)
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        return await asyncio.shield(writing)

"""Feeds trackers while the run goes on, each in a thread of its own.

The log is the queue: a tracker's thread reads the log from the tracker's last event on, some events at a time. So nothing waits
for a tracker, and a tracker that was away gets all events that it has missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from dtfm.coordinator.store.record import Record
from dtfm.coordinator.store.store import Store
from dtfm.coordinator.track.tracker import TrackedRun, Tracker, leave, open_tracker, put, why
from dtfm.coordinator.view import story_snapshot
from dtfm.protos.run_file.trackers import Destination

log = logging.getLogger(__name__)

SHORTEST_PAUSE = 1.0
"""Seconds between two looks at the log."""
FIRST_RETRY, LAST_RETRY = 1.0, 60.0
"""Seconds before a failed tracker is opened again: the first time, and the most."""
SAID_AGAIN = 3600.0
"""Seconds after which a lasting failure is logged again."""
CLOSE_SECONDS = 10.0
"""The longest wait at the end for unwritten figures."""


@asynccontextmanager
async def tracking(
    destinations: Sequence[Destination],
    run: TrackedRun,
    store: Store,
    on_event: Callable[[Callable[[Record], None]], None],
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[None]:
    """A context that writes the run's curves to all destinations. ``on_event`` takes a function to call with each later event."""
    feeds = [Feed(destination, run, store, clock) for destination in destinations]
    for feed in feeds:
        on_event(feed.wake)
    try:
        yield
    finally:
        until = time.monotonic() + CLOSE_SECONDS
        for feed in feeds:
            feed.end()
        for feed in feeds:
            await asyncio.to_thread(feed.join, max(0.0, until - time.monotonic()))


class Feed:
    """A tracker's thread. Any thread may call ``wake`` and ``end``."""

    def __init__(self, destination: Destination, run: TrackedRun, store: Store, clock: Callable[[], float]) -> None:
        self._destination, self._run, self._store, self._clock = destination, run, store, clock
        self._news, self._ending = threading.Event(), threading.Event()
        self._said: float | None = None  # when a failure that lasts was said last
        self._has_all = self._is_given_up = False
        self._thread = threading.Thread(target=self._feed, name=destination.kind, daemon=True)
        self._thread.start()

    def wake(self, _record: Record) -> None:
        """Tells the thread that the log has something new."""
        self._news.set()

    def end(self) -> None:
        """Tells the thread that nothing will be added to the log."""
        self._ending.set()
        self._news.set()

    def join(self, seconds: float) -> None:
        """Waits at most ``seconds`` until the tracker has all events."""
        self._thread.join(seconds)
        self._is_given_up = True  # the process ends: opens nothing
        if not self._has_all:
            log.warning(
                "%s does not have the end of the curves yet; to write the missing points: dtfm-coordinator events --to %s",
                self._destination,
                self._destination,
            )
            leave(self._destination)

    def _feed(self) -> None:
        pause, is_last = FIRST_RETRY, False
        while not (self._has_all or is_last or self._is_given_up):
            is_last = self._ending.is_set()
            tracker = None
            try:
                tracker = open_tracker(self._destination, self._run)
                self._follow(tracker)
                tracker.close()
                self._has_all = True
            except Exception as error:  # a library may raise anything
                pause = FIRST_RETRY if self._said is None else min(2 * pause, LAST_RETRY)
                self._failed(error)
                with contextlib.suppress(Exception):
                    if tracker is not None:
                        tracker.close()
                self._ending.wait(pause)

    def _follow(self, tracker: Tracker) -> None:
        """Writes the log's events, and then each addition, until the end."""
        so_far = story_snapshot.newest(self._store.snapshots(tracker.has)).now
        while True:
            self._news.clear()
            is_last = self._ending.is_set()
            while page := self._store.page(so_far.sequence):
                for record in page:
                    so_far.add(record)
                    put(tracker, so_far, record)
                tracker.flush()
            self._works()
            if is_last:
                return
            self._news.wait()
            self._ending.wait(SHORTEST_PAUSE)

    def _works(self) -> None:
        if self._said is not None:
            self._said = None
            log.warning("%s has all of the curves again", self._destination)

    def _failed(self, error: Exception) -> None:
        now = self._clock()
        if self._is_given_up or (self._said is not None and now - self._said < SAID_AGAIN):
            return
        self._said = now
        log.warning(
            "%s gets no curves: %s. The run goes on, and the missing points are written once this works",
            self._destination,
            why(error),
        )

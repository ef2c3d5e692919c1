"""Reads the log for pages and metrics, in a thread of its own: neither a long log nor many viewers delay a commit."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dtfm.coordinator.store.record import Record, Snapshot, StoreError
from dtfm.coordinator.store.store import Store
from dtfm.coordinator.view import story_snapshot
from dtfm.coordinator.view.condition.condition import Fitness, fitness
from dtfm.coordinator.view.metrics import Figures
from dtfm.coordinator.view.page import page_text
from dtfm.coordinator.view.so_far import SoFar
from dtfm.coordinator.view.story import Story
from dtfm.protos import control_pb2 as wire

log = logging.getLogger(__name__)
SHORTEST_PAUSE = 0.25
"""Seconds between two looks at the log. Events between two looks are shown together."""
FRESH_SECONDS = 1.0
"""The page is made again after this time even if nothing has happened, and metrics at most once in it. All viewers get the same
page."""

OWN_DISK = Path("dtfm-runs")
"""The folder of checkpoints on the coordinator's own disk, in its working folder."""

FINISH_SECONDS = 1.0
"""How long the follower goes on reading at the end."""


class Follower:
    """Holds the story as far as it has read the log, and takes snapshots of the story. Only its own thread touches the story."""

    def __init__(self, store: Store, story: Story, beats: Callable[[], Mapping[str, wire.Heartbeat]] = dict) -> None:
        """``beats`` returns each member's last heartbeat, which no log has."""
        self._store = store
        self._story = story
        self._beats = beats
        self._kept = 0  # the event of the last snapshot
        self._thread = ThreadPoolExecutor(1, "follower")
        self._written, self._read = asyncio.Event(), asyncio.Event()
        self._made: tuple[int, float, bytes] | None = None
        self._figures = 0.0, b""  # when they were made
        self._follows = True  # until a bug ends that
        self.last = story.now.sequence
        self.ended = asyncio.Event()
        """Set when reading has ended: then nobody needs to wait for news."""

    def wake(self, _record: Record) -> None:
        """Tells the follower that the log has something new."""
        self._written.set()

    async def follow(self) -> None:
        """Reads the log, and then each addition to it, until it is cancelled."""
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
        except Exception:
            self._follows = False
            log.exception("a bug in dtfm: the page stands still from now on; the run goes on")

    async def news(self, seconds: float) -> int:
        """The number of the newest event that was read. Waits until there is another event, or for this time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._read.wait(), seconds)
        return self.last

    async def page(self, at: int | None) -> bytes:
        """The page's JSON, compressed by gzip, as of this event; None: as of now. Raises StoreError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._page, at)

    async def metrics(self) -> bytes:
        """The figures in Prometheus' format."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._metrics)

    async def fitness(self, problem: str = "") -> Fitness:
        """Whether the run makes progress. ``problem``: why the coordinator itself is not well."""
        problem = problem or (
            "" if self._follows else "a bug in dtfm: the coordinator has stopped reading its log for the page"
        )
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: fitness(self._story.now, time.time(), problem)
        )

    async def told(self) -> Snapshot:
        """A snapshot of the story so far, for viewers."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, story_snapshot.take, self._story)

    async def close(self) -> None:
        """Call it when nothing will be added. Takes a last snapshot, of the end if the end is near."""
        if self.ended.is_set():
            return
        self.ended.set()
        self._read.set()
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._finish)
        except StoreError as error:
            log.warning("the end of the log cannot be read: %s", error)
        self._thread.shutdown(wait=False)

    async def _more(self) -> bool:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._read_on)
        except StoreError as error:
            log.warning(
                "the page is not up to date, as the log cannot be read; this is tried again when there is more: %s",
                error,
            )
            return False

    def _read_on(self) -> bool:
        page = self._store.page(self._story.now.sequence)
        for record in page:
            self._story.add(record)
        if self._story.now.sequence >= self._kept + story_snapshot.EVERY:
            self._keep()
        return bool(page)

    def _finish(self) -> None:
        until = time.monotonic() + FINISH_SECONDS
        while time.monotonic() < until and self._read_on():
            pass
        if self._story.now.sequence > self._kept:
            self._keep()

    def _keep(self) -> None:
        self._kept = self._story.now.sequence
        try:
            self._store.keep(story_snapshot.take(self._story))
        except StoreError as error:
            log.warning("no story snapshot of event %d: %s", self._kept, error)

    def _earlier(self, sequence: int) -> SoFar:
        return story_snapshot.newest(self._store.snapshots(sequence)).now

    def _metrics(self) -> bytes:
        if (now := time.time()) - self._figures[0] > FRESH_SECONDS:
            size, _, free = shutil.disk_usage(OWN_DISK if OWN_DISK.exists() else ".")
            reserves = None
            with contextlib.suppress(StoreError):
                reserves = self._store.reserves()
            self._figures = now, Figures(self._story.now, size, free, reserves, now).text()
        return self._figures[1]

    def _page(self, at: int | None) -> bytes:
        story, now = self._story, time.time()
        last = story.now.sequence
        if at is not None and at < last:
            then = story.at(at, self._store.read, self._earlier)
            return _compressed(page_text(then, story.history, self._store.last, then.last))
        if self._made is None or self._made[0] != last or now - self._made[1] > FRESH_SECONDS:
            self._made = (
                last,
                now,
                _compressed(page_text(story.now, story.history, self._store.last, now, self._beats())),
            )
        return self._made[2]


def _compressed(text: str) -> bytes:
    return gzip.compress(text.encode(), 4)

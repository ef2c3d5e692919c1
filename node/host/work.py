"""How much this process has done of its part in the run, and whether it waits for others: heartbeats say so.

Process-wide, like logging. Whatever does a piece of work calls ``did``; a thread of a step does it within ``working``, and waits
for others within ``waiting``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Work:
    """For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = 0
        self._busy = 0
        self._mine = threading.local()

    def did(self, pieces: int = 1) -> None:
        """So many pieces are done: a micro-batch's pass, a tensor that was added up, a part of the state that has come."""
        with self._lock:
            self._done += pieces

    def came(self) -> None:
        """A part of a tensor has come. It counts while nothing else is done: what comes to a thread that hangs shows nothing."""
        with self._lock:
            self._done += self._busy == 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """This thread works on the run, in the block."""
        self._mine.works = True
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)
            self._mine.works = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A thread that works waits for others in the block; for any other thread the block is nothing."""
        works = getattr(self._mine, "works", False)
        self._mine.works = False  # what waits within this block waits already
        self._change(-works)
        try:
            yield
        finally:
            self._change(works)
            self._mine.works = works

    @property
    def so_far(self) -> tuple[int, bool]:
        """The number of pieces done since the process began, and whether no thread works."""
        with self._lock:
            return self._done, self._busy == 0

    def _change(self, by: int) -> None:
        with self._lock:
            self._busy += by


WORK = Work()

"""A search's progress on standard error: one line that is rewritten on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dtfm.coordinator.log.wording import seconds_in_words

QUIET_SECONDS = 2.0
"""What takes less needs no progress."""
SHORTEST_PAUSE, LONGEST_PAUSE = 5.0, 60.0
"""Seconds between two lines without a terminal: half of the time so far, within these."""


class SearchProgress:
    """Shows what a search has found so far. A context manager. ``improved`` is for any thread."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic, task: str = "Planning") -> None:
        self._console = console
        self._task = task
        self._clock = clock
        self._began = clock()
        self._next_line = QUIET_SECONDS
        self._live: Live | None = None
        self._plans = 0
        self._best: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def improved(self, plans: int, seconds: float) -> None:
        """The best of the first ``plans`` plans takes ``seconds`` a step."""
        self._plans, self._best = plans, seconds

    def show(self) -> None:
        """Brings the line up to date. To be called some times a second."""
        elapsed = self._clock() - self._began
        if elapsed < QUIET_SECONDS:
            return
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(Text(self.line(elapsed), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif elapsed >= self._next_line:
            self._next_line = elapsed + min(LONGEST_PAUSE, max(SHORTEST_PAUSE, elapsed / 2))
            self._console.print(self.line(elapsed), markup=False, highlight=False, soft_wrap=True)

    def line(self, elapsed: float) -> str:
        """Like "Planning 41 s: 12.3 s a step; 52,000 plans tried", which fits a narrow terminal."""
        if self._best is None:
            return f"{self._task} {elapsed:.0f} s: no plan yet"
        return f"{self._task} {elapsed:.0f} s: {seconds_in_words(self._best)} a step; {self._plans:,} plans tried"

"""A run's progress: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.view.for_people import is_for_people

LINES = 10
"""Number of lines about steps that a whole run prints without a terminal."""

_SAID_OTHERWISE = (ev.RunStarted, ev.RunFailed)
_FOR_OTHERS = (ev.InvitationMade, ev.RunDescribed)
"""What matters where other people's nodes join."""


class RunProgress:
    """Shows events as they come. A context manager."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._rate: float | None = None
        self._over = False
        self._last = time.monotonic()
        self._bar = Progress(
            TextColumn("step"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]} tokens/s"),
            _TimeLeft(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("step", total=steps, loss="-", rate="-")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, event: ev.Event) -> None:
        if isinstance(event, ev.StepCommitted):
            self._show_step(event)
        elif isinstance(event, ev.RunFinished):
            self._over = True  # that its nodes leave then is no news
        elif not self._over and is_for_people(event) and not isinstance(event, _SAID_OTHERWISE + _FOR_OTHERS):
            self._console.print(event.narrate(), markup=False, highlight=False)

    def _show_step(self, event: ev.StepCommitted) -> None:
        if (rate := event.tokens_per_second) is not None:
            self._rate = rate if self._rate is None else 0.9 * self._rate + 0.1 * rate
        shown = f"{self._rate:,.0f}" if self._rate is not None else "-"
        self._bar.update(self._task, completed=event.step, loss=f"{event.loss:.3f}", rate=shown)
        every = max(1, self._steps // LINES)
        if not self._console.is_terminal and (event.step % every == 0 or event.step in (1, self._steps)):
            self._console.print(f"{event.narrate()} ({event.step} of {self._steps})", markup=False, highlight=False)


class _TimeLeft(ProgressColumn):
    """The time left, as rich estimates it from the last steps."""

    def __init__(self) -> None:
        super().__init__()
        self._column = TimeRemainingColumn()

    def render(self, task: Task) -> Text:
        return Text.assemble(self._column.render(task), " left")

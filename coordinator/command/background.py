"""Tells people about slow work: work on a thread of its own, what is being loaded, the progress of a search."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from threading import Event, Thread, Timer
from types import FrameType
from typing import TypeVar

from dtfm.programs import ended_by_ctrl_c

QUIET_SECONDS = 2.0
"""Seconds after which slow work is announced."""
LOOK_SECONDS = 0.2
"""Seconds after which Ctrl-C is heard if it does not end a wait immediately."""

Result = TypeVar("Result")


@contextmanager
def announced(what: str) -> Iterator[None]:
    """A context for the work ``what``. If the work takes longer than QUIET_SECONDS, says so on standard error. Inside it Ctrl-C
    ends the process immediately."""
    with _said_later(what), ended_by_ctrl_c():
        yield


@contextmanager
def _said_later(what: str) -> Iterator[None]:
    timer = Timer(QUIET_SECONDS, print, (f"{what} ...",), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def search_shown(task: str) -> Iterator[Callable[[int, float], None]]:
    """A context that shows on a terminal how long a search takes, and elsewhere announces it. It gives a function for the
    search, for any thread: it reports the number of plans that it has tried, and the best plan's seconds per step."""
    from rich.console import Console  # which `demo` and `serve` show their help without
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    from dtfm.coordinator.log.wording import seconds_in_words

    columns = TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    console = Console(stderr=True)
    with (
        nullcontext() if console.is_terminal else _said_later(task),
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown,
    ):
        number = shown.add_task(f"{task}: no plan yet")

        def improved(plans: int, seconds: float) -> None:
            found = f"{seconds_in_words(seconds)} a step; {plans:,} plans tried"
            shown.update(number, description=f"{task}: {found}")

        yield improved


def in_background(work: Callable[[], Result], stop: Event | None = None) -> Result:
    """Returns the result of ``work``, or raises its exception. Ctrl-C sets ``stop``: then ``work`` is to end. A second Ctrl-C
    raises KeyboardInterrupt immediately, as does the first if ``stop`` is None."""
    result: Future[Result] = Future()

    def carry_out() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        assert stop is not None
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.getsignal(signal.SIGINT)
    if stop is not None:
        signal.signal(signal.SIGINT, interrupt)
    try:
        Thread(target=carry_out, daemon=True).start()  # a second Ctrl-C does not wait for it
        while not wait([result], LOOK_SECONDS).done:
            pass
        return result.result()
    finally:
        signal.signal(signal.SIGINT, before)

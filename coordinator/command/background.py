"""What a command says while something takes long: work on a thread of its own, and what is being loaded."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import Event, Thread, Timer
from types import FrameType
from typing import TypeVar

from dtfm.programs import ended_by_ctrl_c

QUIET_SECONDS = 2.0
"""Seconds after which something that takes long is announced."""
LOOK_SECONDS = 0.2
"""Seconds between two looks at the progress."""

Result = TypeVar("Result")


@contextmanager
def announced(what: str) -> Iterator[None]:
    """A context that says ``what`` is being done, on standard error, once this has taken QUIET_SECONDS. In it Ctrl-C ends the
    process at once."""
    timer = Timer(QUIET_SECONDS, print, (f"{what} ...",), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        with ended_by_ctrl_c():
            yield
    finally:
        timer.cancel()


def in_background(work: Callable[[], Result], look: Callable[[], None], stop: Event | None = None) -> Result:
    """What ``work`` returns, or raises. Until then, ``look`` is called some times a second.

    Ctrl-C sets ``stop``, at which ``work`` is to come to an end. A second one raises KeyboardInterrupt at once, as does the first
    where ``stop`` is None.
    """
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
            look()
        return result.result()
    finally:
        signal.signal(signal.SIGINT, before)

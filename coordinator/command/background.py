"""Work on a thread of its own, while this one shows progress and hears Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Event, Thread
from types import FrameType
from typing import TypeVar

LOOK_SECONDS = 0.2
"""Seconds between two looks at the progress."""

Result = TypeVar("Result")


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

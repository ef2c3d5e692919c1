"""Says what a node is doing whenever that takes long, so that nobody takes it for stuck."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

LONG_SECONDS = 2.0


class _Part:
    """One that goes on. ``done``: how much of it, from 0 to 1; None: not known."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.done: float | None = None


_parts: list[_Part] = []
"""Those that go on in this process, the newest last. Any thread may begin one."""


def doing() -> tuple[str, float | None]:
    """What the newest part is, and how much of it is done, if that is known; empty: nothing takes long."""
    return next(((part.what, part.done) for part in reversed(_parts)), ("", None))


def report(what: str, done: float) -> None:
    """Says how much of the part of this name is done, if it goes on."""
    for part in _parts:
        if part.what == what:
            part.done = min(1.0, max(0.0, done))


@contextmanager
def long_part(what: str, long_seconds: float = LONG_SECONDS) -> Iterator[None]:
    """A context for one part of the way to the first step. Once it has taken ``long_seconds`` the log says ``what`` it is, and at
    its end how long it took."""
    began = time.monotonic()
    part = _Part(what)
    _parts.append(part)
    timer = threading.Timer(long_seconds, log.info, ("%s ...", what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _parts.remove(part)
    if (took := time.monotonic() - began) > long_seconds:
        log.info("%s took %.1f s", what, took)

"""Logs what a node is doing whenever that takes long, so that nobody takes it for stuck."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

LONG_SECONDS = 2.0


class Repeated:
    """A message that would be logged again and again, for example about attempts that fail in the same way."""

    def __init__(self, every_seconds: float) -> None:
        self._every = every_seconds
        self._last = ("", -math.inf)

    def is_news(self, what: str, now: float) -> bool:
        """Whether to log the message ``now``: it differs from the last one, or that was long ago."""
        if what == self._last[0] and now - self._last[1] < self._every:
            return False
        self._last = (what, now)
        return True


@contextmanager
def long_part(what: str, long_seconds: float = LONG_SECONDS) -> Iterator[None]:
    """A context for one part of the way to the first step. When the part has taken ``long_seconds`` the log says ``what`` it
    is, and at its end how long it took."""
    began = time.monotonic()
    timer = threading.Timer(long_seconds, log.info, ("%s ...", what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if (took := time.monotonic() - began) > long_seconds:
        log.info("%s took %.1f s", what, took)

"""Logs what a node is doing whenever that takes long, so that nobody takes it for stuck."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

LONG_SECONDS = 2.0


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

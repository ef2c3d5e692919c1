"""Brings the run's samples to this machine, and to others, while the node does its other work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from dtfm.node.data.dataset import Data

log = logging.getLogger(__name__)


class Holding:
    """Fetches samples, or reads and tokenizes them, and publishes them. Its threads do not hold up a node that stops. Methods
    are called from any thread, and return immediately."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: tuple[Data, Future[None]] | None = None
        self._published: Data | None = None

    def begin(self, data: Data) -> Future[None]:
        """Returns a future that is done when ``data``'s samples are on this machine. It has the exceptions of `Data.hold`. A
        failed attempt is repeated."""
        with self._lock:
            if self._held is not None and self._held[0] is data:
                future = self._held[1]
                if not future.done() or future.exception() is None:
                    return future
            future = _apart("hold data", data.hold)
            self._held = data, future
            return future

    def begin_early(self, data: Data) -> None:
        """Like `begin`, before it is known whether the samples are needed. If it fails, the error comes again when they are."""
        self.begin(data).add_done_callback(partial(_warn, "the data cannot be had yet"))

    def publish(self, data: Data, place: str) -> None:
        """Writes ``data`` to ``place``, once, for nodes that join later."""
        with self._lock:
            if self._published is data:
                return
            self._published = data
        failed = partial(_warn, "the tokens could not be written beside the checkpoints")
        _apart("publish data", lambda: data.publish(place)).add_done_callback(failed)


def _warn(what: str, done: Future[None]) -> None:
    if (problem := done.exception()) is not None:  # whatever the file system raises
        log.warning("%s: %s", what, problem)


def _apart(name: str, work: Callable[[], None]) -> Future[None]:
    """Runs ``work`` in a daemon thread. The end of the process would wait for the threads of an executor."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # whoever waits for it may give up; others may not

    def run() -> None:
        try:
            work()
        except BaseException as problem:
            future.set_exception(problem)
        else:
            future.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future

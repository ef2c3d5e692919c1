"""Sends messages to the operator's URL when a person should look ([notify] in the run file).

A thread sends one message after the other. Nothing waits for this thread: if its queue is full, a message is lost. The URL may
hold a token, so no line of the log has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

import dtfm
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.view.published import for_anybody
from dtfm.coordinator.view.so_far import MOVES_ON, is_stalled

log = logging.getLogger(__name__)

SEND_SECONDS = 10.0
"""The longest silence of the receiver, and the longest wait at the end for the remaining messages."""
MOST_WAITING = 16
LOOK_SECONDS = 1.0
"""Seconds between two looks at whether the run stands still."""

_TOLD = (
    ev.RunStarted
    | ev.RunResumed
    | ev.RunFinished
    | ev.RunFailed
    | ev.RunStopped
    | ev.CoordinatorStopped
    | ev.NodeQuarantined
    | ev.LossSpiked
)


@asynccontextmanager
async def notifying(
    url: str, ledger: Callable[[], Ledger], on_event: Callable[[Callable[[Record], None]], None]
) -> AsyncIterator[None]:
    """A context that sends messages about the run to ``url``; empty: to nobody. ``on_event`` takes a function that hears of
    each later event."""
    if not url:
        yield
        return
    notifier = Notifier(url, ledger)
    on_event(notifier.heard)
    looking = asyncio.create_task(notifier.look())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.to_thread(notifier.close)


class Notifier:
    """``ledger`` returns the present ledger. The event loop calls ``heard`` and ``look``."""

    def __init__(self, url: str, ledger: Callable[[], Ledger]) -> None:
        self._url = url
        self._ledger = ledger
        self._since = time.time()  # since when the next commit is waited for
        self._why = ""  # why nothing trains
        self._stalled = False  # whether that was told
        self._has_failed = False  # the last message
        self._waiting = queue.Queue[bytes | None](MOST_WAITING)
        self._thread = threading.Thread(target=self._send_all, name="notify", daemon=True)
        self._thread.start()

    def heard(self, record: Record) -> None:
        event = record.event
        if isinstance(event, _TOLD):
            self._tell(event.event, event.narrate())
        if isinstance(event, ev.Waiting):
            self._why = event.reason
            if event.asks:
                self._tell(event.event, event.narrate())
        if isinstance(event, MOVES_ON):
            if self._stalled and isinstance(event, ev.StepCommitted):
                self._tell("run_goes_on", f"step {event.step} is committed")
            self._since, self._why, self._stalled = record.time, "", False

    async def look(self) -> None:
        """Sends a message when the run stands still, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if not self._stalled and is_stalled(self._ledger(), self._since, time.time()):
                self._stalled = True
                long, step = time.time() - self._since, self._ledger().training.step
                why = f": {self._why}" if self._why else ""
                self._tell("run_stalled", f"no step was committed for {long:.0f} s, after step {step}{why}")

    def close(self) -> None:
        """Sends the waiting messages, for at most SEND_SECONDS."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(SEND_SECONDS)

    def _tell(self, event: str, sentence: str) -> None:
        told = {"run": str(self._ledger().run.get("name", "")), "event": event, "sentence": for_anybody(sentence)}
        try:
            self._waiting.put_nowait(json.dumps(told).encode())
        except queue.Full:
            self._failed("too many messages wait")

    def _send_all(self) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": f"dtfm/{dtfm.__version__}"}
        while (message := self._waiting.get()) is not None:
            try:
                with _OPENER.open(Request(self._url, message, headers), timeout=SEND_SECONDS):
                    self._has_failed = False
            except HTTPError as error:
                error.close()
                self._failed(f"it answered {error.code}")
            except Exception as error:  # whose text may have the URL
                self._failed(type(error.reason if isinstance(error, URLError) else error).__name__)

    def _failed(self, why: str) -> None:
        if not self._has_failed:
            log.warning(
                "a message to the run file's notify.url was lost; this is said again once one has arrived: %s", why
            )
        self._has_failed = True


class _StayHere(HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Refuses redirections: a message would arrive elsewhere as a GET, without its content."""


_OPENER = build_opener(_StayHere)

"""Writing the log: entries before anything is sent, ledger snapshots beside them, and readers that follow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

from dtfm.coordinator.log import ledger_snapshot
from dtfm.coordinator.log.events import Event
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.store import Record, Store, StoreError

log = logging.getLogger(__name__)
P = ParamSpec("P")
Result = TypeVar("Result")


class LogWriter:
    """The store's only writer. Its writes run in threads, and go on even if their caller is cancelled."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listeners: set[Callable[[Record], None]] = set()
        self._appended = asyncio.Event()
        self._writing: set[asyncio.Future[Any]] = set()
        self._snapshot_due = store.last_snapshot + ledger_snapshot.EVERY
        self._snapshots = asyncio.Lock()
        self._closed = False

    @property
    def snapshot_is_due(self) -> bool:
        return self._store.last >= self._snapshot_due

    def on_event(self, listener: Callable[[Record], None]) -> None:
        """Calls ``listener`` with every event from now on, once it is in the log."""
        self._listeners.add(listener)

    async def append(self, events: Sequence[Event]) -> None:
        """One durable write. Raises StoreError."""
        for record in await self._write(self._store.append, events):
            for listener in self._listeners:
                listener(record)
        self._appended.set()
        self._appended = asyncio.Event()

    def take_snapshot(self, ledger: Ledger) -> Coroutine[Any, Any, None]:
        """Keeps ``ledger``, which is the fold of the log as of this call, however late the coroutine runs."""
        last = self._store.last
        self._snapshot_due = last + ledger_snapshot.EVERY
        return self._keep(ledger, last)

    async def records(self, after: int, follow: bool) -> AsyncIterator[Record]:
        """The events with larger sequence numbers than ``after``; with ``follow``, later ones too. Raises StoreError."""
        while True:
            appended = self._appended
            page = await asyncio.to_thread(self._store.page, after)
            for record in page:
                yield record
                after = record.sequence
            if page:
                continue
            if not follow or self._closed:
                return
            await appended.wait()

    async def close(self) -> None:
        """Waits for writes in progress, and lets followers end."""
        self._closed = True
        self._appended.set()
        if self._writing:
            await asyncio.wait(self._writing)

    async def _keep(self, ledger: Ledger, last: int) -> None:
        async with self._snapshots:  # one after the other, since the newest counts
            if last <= self._store.last_snapshot:
                return
            try:
                await self._write(lambda: self._store.keep(ledger_snapshot.take(ledger, last)))
            except StoreError as error:
                log.warning("no ledger snapshot of event %d: %s", last, error)

    async def _write(self, write: Callable[P, Result], *arguments: P.args, **options: P.kwargs) -> Result:
        writing = asyncio.ensure_future(asyncio.to_thread(write, *arguments, **options))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        return await asyncio.shield(writing)

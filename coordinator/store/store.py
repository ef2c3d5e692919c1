"""The event log in a database, SQLite or PostgreSQL: append-only, one row per event."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

import sqlalchemy as sa

from dtfm.coordinator.log.events import Event, to_text
from dtfm.coordinator.store import lease
from dtfm.coordinator.store.database import explained, open_engine, sqlite_file
from dtfm.coordinator.store.record import Record as Record, Snapshot, StoreError as StoreError, read_row
from dtfm.file_lock import try_lock

_PAGE, _LAST = 1000, 2**31 - 1
_LEAST_SNAPSHOTS, _MOST_CHARACTERS = 2, 32_000_000
"""The number of snapshots that are always kept, and the most that all may hold together."""
_EVENTS = sa.Table(
    "events",
    lease.METADATA,
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("event", sa.Text, nullable=False),
)
_SNAPSHOTS = sa.Table(
    "snapshots",
    lease.METADATA,
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("format", sa.Integer, nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("text", sa.Text, nullable=False),
)


class Store:
    """An open log. One process writes at a time, because it gives out the sequence numbers: it has locked the SQLite file, or
    has the lease (lease.py). ``url``: without the password."""

    def __init__(self, url: str, *, write: bool, waits: bool = False) -> None:
        """``waits``: for a lease that another process has, as long as that process renews it. Raises StoreError."""
        self._engine = open_engine(url, write=write)
        self.url = self._engine.url.render_as_string()
        self._lock: int | None = None
        self._epoch = 0  # of the lease; 0: it has none
        self.was_reserve = False  # whether another one had the lease before it
        self._last = 0
        self._is_uncertain = False  # whether the last append has been stored
        if write and (path := sqlite_file(self._engine.url)):
            self._lock = try_lock(lock := Path(f"{path}.lock"))
            if self._lock is None:
                raise StoreError(
                    f"another coordinator uses this store ({lock} is locked); stop it, or give this one its own with --store"
                )
        try:
            with explained(self.url):
                if self._lock is not None:
                    lease.METADATA.create_all(self._engine)
                elif write:
                    self._epoch, self.was_reserve = lease.take(self._engine, self.url, waits=waits)
                with self._engine.connect() as connection:
                    self._last = connection.execute(sa.select(sa.func.max(_EVENTS.c.sequence))).scalar() or 0
        except BaseException:
            self.close()
            raise

    @property
    def last(self) -> int:
        """The sequence number of the newest event that this object wrote, or found when it opened the store; 0: none."""
        return self._last

    def append(self, events: Sequence[Event]) -> list[Record]:
        """Writes all events or none. They are on disk when this returns. Raises StoreError: even then the events may have been
        written, and the next call must repeat them."""
        now = time.time()
        records = [Record(self._last + 1 + i, now, event) for i, event in enumerate(events)]
        rows = [{"sequence": each.sequence, "time": each.time, "event": to_text(each.event)} for each in records]
        with self._writing() as connection:
            stored = self._between(connection, self._last, records[-1].sequence) if self._is_uncertain else []
            if [record.event for record in stored] == list(events):
                records = stored
            else:
                self._is_uncertain = True
                connection.execute(sa.insert(_EVENTS), rows)
        self._is_uncertain = False
        self._last += len(records)
        return records

    def renew(self, seconds: float) -> None:
        """Renews the lease for ``seconds``; 0 gives it up. An SQLite file has no lease. Raises StoreError."""
        if self._epoch:
            with explained(self.url), self._engine.begin() as connection:
                lease.hold(connection, self._epoch, seconds=seconds)

    def reserves(self) -> int | None:
        """The number of coordinators that wait to take over; None: there is no lease. Raises StoreError."""
        if not self._epoch:
            return None
        with explained(self.url), self._engine.connect() as connection:
            return lease.reserves(connection)

    def read(self, after: int = 0) -> Iterator[Record]:
        """The events with larger sequence numbers than ``after``, in order. Raises StoreError."""
        while page := self.page(after):
            yield from page
            after = page[-1].sequence

    def keep(self, snapshot: Snapshot) -> None:
        """Writes the snapshot. While all snapshots hold too much together, removes the one whose neighbours are the fewest
        events apart. Raises StoreError."""
        sequence, size = _SNAPSHOTS.c.sequence, sa.func.length(_SNAPSHOTS.c.text)
        query = sa.select(sequence, size).where(sequence < snapshot.sequence).order_by(sequence.desc())
        with self._writing() as connection:
            sizes = {snapshot.sequence: len(snapshot.text)} | {row[0]: row[1] for row in connection.execute(query)}
            kept = list(sizes)
            while len(kept) > _LEAST_SNAPSHOTS and sum(sizes[each] for each in kept) > _MOST_CHARACTERS:
                del kept[min(range(_LEAST_SNAPSHOTS, len(kept)), key=lambda i: kept[i - 1] - [*kept, 0][i + 1])]
            connection.execute(sa.delete(_SNAPSHOTS).where(sequence.not_in(kept[1:])))
            connection.execute(sa.insert(_SNAPSHOTS).values(asdict(snapshot)))

    def snapshots(self, until: int) -> Iterator[Snapshot]:
        """The snapshots of events up to this one, the newest first. Raises StoreError."""
        while True:
            query = sa.select(_SNAPSHOTS).where(_SNAPSHOTS.c.sequence <= until)
            with explained(self.url), self._engine.connect() as connection:
                row = connection.execute(query.order_by(_SNAPSHOTS.c.sequence.desc()).limit(1)).first()
            if row is None:
                return
            yield Snapshot(row.sequence, row.format, row.digest, row.text)
            until = row.sequence - 1

    def put_aside(self) -> str:
        """Renames the store's file, and closes the store: after that, a store with the same URL is empty. Returns the new name.
        Raises StoreError."""
        if self._lock is None:
            raise StoreError(f"{self.url} is no SQLite file that could be put aside; give an empty store with --store")
        path = sqlite_file(self._engine.url)
        self._engine.dispose()
        aside = free_name(path)
        for suffix in ("", "-wal", "-shm"):
            if os.path.exists(path + suffix):
                os.rename(path + suffix, aside + suffix)
        return aside

    def close(self) -> None:
        with contextlib.suppress(StoreError):
            self.renew(0)
        self._engine.dispose()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def page(self, after: int) -> list[Record]:
        """The first events with larger sequence numbers than ``after``. Empty: there are no more of them. Raises StoreError."""
        with explained(self.url), self._engine.connect() as connection:
            return self._between(connection, after, _LAST, _PAGE)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        """A transaction that fails unless this process may write."""
        with explained(self.url), self._engine.begin() as connection:
            if self._epoch:
                lease.hold(connection, self._epoch)
            yield connection

    def _between(self, connection: sa.Connection, after: int, until: int, most: int | None = None) -> list[Record]:
        sequence = _EVENTS.c.sequence
        query = sa.select(_EVENTS).where(sequence.between(after + 1, until)).order_by(sequence).limit(most)
        return [read_row(self.url, row) for row in connection.execute(query)]


def free_name(path: str) -> str:
    """A name for a file that is put aside: ``path`` with the first free number."""
    root, suffix = os.path.splitext(path)
    return next(name for n in itertools.count(1) if not os.path.exists(name := f"{root}.{n}{suffix}"))

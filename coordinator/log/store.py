"""The event log in a database: append-only, one row per event. Any database of SQLAlchemy's will do; SQLite is tested."""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import IO, Any, Self

import sqlalchemy as sa
from sqlalchemy import exc

from dtfm.coordinator.log.events import Event, StepCommitted, StepTimesSummed, to_text
from dtfm.coordinator.log.record import (
    Record as Record,
    Snapshot,
    StoreError as StoreError,
    check_exists,
    in_words,
    read_row,
)
from dtfm.coordinator.log.step_times import summed, times_to_text, without_times

_PAGE = 1000
_LEAST_SNAPSHOTS, _MOST_CHARACTERS = 2, 32_000_000
"""The number of snapshots that are kept in any case, and what all may hold together."""
_METADATA = sa.MetaData()
_EVENTS = sa.Table(
    "events",
    _METADATA,
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("event", sa.Text, nullable=False),
)
_STEP_TIMES = sa.Table(  # of step_committed events: see step_times.py
    "step_times",
    _METADATA,
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("text", sa.Text, nullable=False),
)
_SNAPSHOTS = sa.Table(
    "snapshots",
    _METADATA,
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("format", sa.Integer, nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("text", sa.Text, nullable=False),
)


class AnotherWriter(StoreError):
    """Another coordinator writes to the same log."""


class Store:
    """An open log. One process writes at a time, since it gives out the sequence numbers: a second one is refused when it opens a
    file, and at its first append to another kind of database."""

    def __init__(self, url: str, *, write: bool) -> None:
        self.url = url
        self._lock: IO[bytes] | None = None
        self._last = 0
        try:
            parsed = sa.make_url(url)
            path = parsed.database if parsed.get_backend_name() == "sqlite" else None
            on_disk = path not in (None, "", ":memory:")
            if on_disk and not write:
                check_exists(path or "")
            if on_disk and write:
                self._lock = _lock(f"{path}.lock")
            self._engine = sa.create_engine(parsed, connect_args={"timeout": 5} if path is not None else {})
            if path is not None:
                sa.event.listen(self._engine, "connect", _durable)
        except (exc.ArgumentError, ModuleNotFoundError) as error:
            raise StoreError(f"{url!r} is not a store: {error}; give a SQLAlchemy URL like sqlite:///dtfm.db") from None
        with _Explained(url):
            if write:
                _METADATA.create_all(self._engine)
            with self._engine.connect() as connection:
                self._last = connection.execute(sa.select(sa.func.max(_EVENTS.c.sequence))).scalar() or 0

    @property
    def last(self) -> int:
        """The sequence number of the newest event that this object wrote, or found when it opened the store; 0: none."""
        return self._last

    def append(self, events: Sequence[Event]) -> list[Record]:
        """Writes all of them or none; they are on disk when this returns. Raises StoreError."""
        now = time.time()
        records = [Record(self._last + 1 + i, now, event) for i, event in enumerate(events)]
        rows, times = [], []
        old: list[sa.ColumnElement[bool]] = [sa.false()]
        for record in records:
            event = record.event
            if isinstance(event, StepCommitted):
                times.append({"sequence": record.sequence, "text": times_to_text(event)})
                event = without_times(event)
            elif isinstance(event, StepTimesSummed):
                old.append(_STEP_TIMES.c.sequence.between(event.after + 1, event.until))
            rows.append({"sequence": record.sequence, "time": record.time, "event": to_text(event)})
        with _Explained(self.url), self._engine.begin() as connection:
            connection.execute(sa.insert(_EVENTS), rows)
            if times:
                connection.execute(sa.insert(_STEP_TIMES), times)
            connection.execute(sa.delete(_STEP_TIMES).where(sa.or_(*old)))
        self._last += len(records)
        return records

    def step_times(self, after: int, until: int) -> StepTimesSummed:
        """What the log is to keep of each node's time in the steps among the events ``after`` < sequence <= ``until``. Raises
        StoreError."""
        with _Explained(self.url), self._engine.connect() as connection:
            return summed(after, until, (record.event for record in self._between(connection, after, until)))

    def read(self, after: int = 0) -> Iterator[Record]:
        """The events with larger sequence numbers than ``after``, in order. Raises StoreError."""
        while page := self.page(after):
            yield from page
            after = page[-1].sequence

    def keep(self, snapshot: Snapshot) -> None:
        """Writes the snapshot. While all hold too much together, every second one of the older ones goes. Raises StoreError."""
        sequence, size = _SNAPSHOTS.c.sequence, sa.func.length(_SNAPSHOTS.c.text)
        query = sa.select(sequence, size).where(sequence < snapshot.sequence).order_by(sequence.desc())
        with _Explained(self.url), self._engine.begin() as connection:
            sizes = {snapshot.sequence: len(snapshot.text)} | {row[0]: row[1] for row in connection.execute(query)}
            kept = list(sizes)
            while len(kept) > _LEAST_SNAPSHOTS and sum(sizes[each] for each in kept) > _MOST_CHARACTERS:
                kept = kept[:_LEAST_SNAPSHOTS] + kept[_LEAST_SNAPSHOTS + 1 :: 2]
            connection.execute(sa.delete(_SNAPSHOTS).where(sequence.not_in(kept[1:])))
            connection.execute(sa.insert(_SNAPSHOTS).values(asdict(snapshot)))

    def snapshots(self, until: int) -> Iterator[Snapshot]:
        """Those of events up to this one, the newest first. Raises StoreError."""
        while True:
            query = sa.select(_SNAPSHOTS).where(_SNAPSHOTS.c.sequence <= until)
            with _Explained(self.url), self._engine.connect() as connection:
                row = connection.execute(query.order_by(_SNAPSHOTS.c.sequence.desc()).limit(1)).first()
            if row is None:
                return
            yield Snapshot(row.sequence, row.format, row.digest, row.text)
            until = row.sequence - 1

    def put_aside(self) -> str:
        """Renames the store's file, and ends with it: a store of the same URL is empty then. Returns the new name. Raises
        StoreError."""
        if self._lock is None:
            raise StoreError(f"{self.url} is no SQLite file that could be put aside; give an empty store with --store")
        path = str(self._engine.url.database)
        self._engine.dispose()
        aside = free_name(path)
        for suffix in ("", "-wal", "-shm"):
            if os.path.exists(path + suffix):
                os.rename(path + suffix, aside + suffix)
        return aside

    def close(self) -> None:
        self._engine.dispose()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def page(self, after: int) -> list[Record]:
        """The first events with larger sequence numbers than ``after``; empty: there are none. Raises StoreError."""
        with _Explained(self.url), self._engine.connect() as connection:
            return self._between(connection, after, after + _PAGE)

    def _between(self, connection: sa.Connection, after: int, until: int) -> list[Record]:
        sequence = _EVENTS.c.sequence
        rows = sa.outerjoin(_EVENTS, _STEP_TIMES, sequence == _STEP_TIMES.c.sequence)
        columns = (sequence, _EVENTS.c.time, _EVENTS.c.event, _STEP_TIMES.c.text)
        query = sa.select(*columns).select_from(rows).where(sequence.between(after + 1, until)).order_by(sequence)
        return [read_row(self.url, row) for row in connection.execute(query)]


def free_name(path: str) -> str:
    """For what is put aside: ``path`` with the first number that is free."""
    root, suffix = os.path.splitext(path)
    return next(name for n in itertools.count(1) if not os.path.exists(name := f"{root}.{n}{suffix}"))


class _Explained:
    """Turns a database's errors into sentences."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if not isinstance(error, exc.SQLAlchemyError):
            return
        where = f"store {sa.make_url(self.url).render_as_string()}"
        if isinstance(error, exc.IntegrityError):
            fix = "stop one of them, or give this one its own with --store"
            raise AnotherWriter(f"{where}: another coordinator writes to it; {fix}") from None
        text = str(getattr(error, "orig", None) or error)
        raise StoreError(f"{where}: {in_words(text)}") from None


def _lock(path: str) -> IO[bytes]:
    """A lock that is held until it is closed, or the process ends."""
    try:
        handle = open(path, "ab")  # noqa: SIM115 (held as long as the store is open)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}; give another file with --store") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise StoreError(
            f"another coordinator uses this store ({path} is locked); stop it, or give this one its own with --store"
        ) from None
    return handle


def _durable(connection: Any, _record: object) -> None:
    """Commits survive a power cut, and readers do not block the writer."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA secure_delete=ON")

"""A record of the event log. SQLAlchemy takes long to load, so it is loaded only when a store is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dtfm.coordinator.log.events import Event, from_json, from_text, to_json


class StoreError(ValueError):
    """The store cannot be used. The message names the cause and the fix."""


class AnotherWriter(StoreError):
    """Another coordinator writes to the same log."""


class StoreAway(StoreError):
    """The store cannot be used for now, as its disk is full or its database does not answer. That may pass by itself."""


@dataclass(frozen=True, slots=True)
class Record:
    """An event in the log. ``sequence`` counts from 1 without gaps. ``time`` is in seconds since 1970, for people: no
    computation uses it."""

    sequence: int
    time: float
    event: Event

    def to_json(self) -> dict[str, Any]:
        """The event's JSON, with the sequence number and the time after its name."""
        fields = to_json(self.event)
        return {"event": fields.pop("event"), "sequence": self.sequence, "time": round(self.time, 3), **fields}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Record:
        """The inverse of ``to_json``. Raises ValueError."""
        return cls(int(fields["sequence"]), float(fields["time"]), from_json(fields))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The result of the events up to ``sequence``, as ``text`` in a ``format``: see view/story_snapshot.py."""

    sequence: int
    format: int
    digest: str
    text: str


def read_log(url: str, after: int = 0) -> Iterator[Record]:
    """The events in the store with larger sequence numbers than ``after``, in order. Raises StoreError."""
    from dtfm.coordinator.store.store import Store

    with Store(url, write=False) as store:
        yield from store.read(after)


def read_snapshots(url: str) -> Iterator[Snapshot]:
    """The snapshots in the store, the newest first. Raises StoreError."""
    from dtfm.coordinator.store.store import Store

    with Store(url, write=False) as store:
        yield from store.snapshots(store.last)


def read_row(url: str, row: Any) -> Record:
    """``row``: sequence number, time, and the event as text. Raises StoreError."""
    sequence, at, text = row
    try:
        return Record(sequence, at, from_text(text))
    except ValueError as error:
        raise StoreError(f"{url} holds an event that cannot be read: {error}") from None


def check_exists(path: str) -> None:
    """Raises StoreError if there is no file: opening it would make one."""
    if not os.path.exists(path):
        raise StoreError(f"there is no store at {path}; give the one that `serve --store` wrote")


def in_words(text: str) -> str:
    """The meaning of a database's error, and the fix. The ``text`` itself if the error is not known."""
    return next((fix for cause, fix in _CAUSES.items() if cause in text), text)


_CAUSES = {
    "is locked": "another process has locked it; stop that one, or give another store with --store",
    "disk is full": "the disk is full; make room",
    "No space left on device": "the database's disk is full; make room",
    "unable to open": "it cannot be opened; make sure that its folder exists and may be written to",
    "UNIQUE constraint": "another coordinator writes to it; stop one of them, or give this one its own with --store",
    "duplicate key": "another coordinator writes to it; stop one of them, or give this one its own with --store",
    "readonly": "it is read-only; change its permissions, or give another with --store",
    "not a database": "it is not a database; give another with --store",
    "no such table": "it is not a store of dtfm; give the one that `serve --store` wrote",
    'relation "events" does not exist': "it is not a store of dtfm; give the one that `serve --store` wrote",
}

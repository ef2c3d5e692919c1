"""The ledger as of some event, kept in the store, so that a restart folds only what came after.

A cache and nothing more: the log alone is the truth, and a snapshot that cannot be read is passed over. As text it is one
line of JSON without the links, then one line of links per node; so none of it takes long to write in one go.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace

from blake3 import blake3
from pydantic import TypeAdapter, ValidationError

from dtfm.coordinator.log.events import Link
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.log.store import Snapshot, Store

log = logging.getLogger(__name__)

FORMAT = 9
"""To be raised whenever the ledger's fields, or what an event does to them, change: then older snapshots are passed over."""

EVERY = 10_000
"""A coordinator takes a snapshot after so many events; folding so many takes some tenths of a second."""

_LEDGER: TypeAdapter[Ledger] = TypeAdapter(Ledger)


def take(ledger: Ledger, sequence: int) -> Snapshot:
    """``ledger`` as of the event ``sequence``, to be kept."""
    text = "\n".join(_lines(ledger))
    return Snapshot(sequence, FORMAT, _digest(sequence, text), text)


def read(snapshot: Snapshot) -> Ledger:
    """Inverse of ``take``. Raises ValueError for one that is damaged or of another format."""
    if snapshot.format != FORMAT:
        raise ValueError(f"it has format {snapshot.format}, this dtfm writes {FORMAT}")
    if snapshot.digest != _digest(snapshot.sequence, snapshot.text):
        raise ValueError("it is damaged: its digest is another")
    first, *rest = snapshot.text.split("\n")
    try:
        ledger = _LEDGER.validate_json(first)
        return replace(ledger, links=dict(map(_row, rest)))
    except (ValidationError, ValueError, TypeError) as error:
        raise ValueError(f"it cannot be read: {str(error).splitlines()[0]}") from None


def restore(store: Store) -> Ledger:
    """What the whole log adds up to: the newest snapshot that can be read, and what came after it. Raises StoreError."""
    for snapshot in store.snapshots():
        try:
            if snapshot.sequence > store.last:
                raise ValueError(f"the log ends with event {store.last}")
            ledger = read(snapshot)
        except ValueError as problem:
            log.warning("passed over the store's snapshot of event %d: %s", snapshot.sequence, problem)
            continue
        return fold((record.event for record in store.read(snapshot.sequence)), ledger)
    return fold(record.event for record in store.read())


def _lines(ledger: Ledger) -> Iterator[str]:
    yield _LEDGER.dump_json(replace(ledger, links={})).decode()
    for source, row in ledger.links.items():
        links = [[link.destination, link.latency_seconds, link.bandwidth, link.problem] for link in row.values()]
        yield json.dumps([source, links])


def _row(line: str) -> tuple[str, dict[str, Link]]:
    source, links = json.loads(line)
    return source, {destination: Link(source, destination, *rest) for destination, *rest in links}


def _digest(sequence: int, text: str) -> str:
    return blake3(f"{sequence}\n{text}".encode()).hexdigest()

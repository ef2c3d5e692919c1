"""The ledger as of some event, kept in the store: a restart folds only the events after it.

It is a cache: the log alone is the truth, and a ledger snapshot that cannot be read is passed over. As text it is one line of
JSON without the links, then one line of links for each node, so that no single piece takes long to make.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace

from blake3 import blake3
from pydantic import TypeAdapter, ValidationError

import dtfm
from dtfm.coordinator.log.events import Link
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.log.store import LedgerSnapshot, Store

log = logging.getLogger(__name__)

EVERY = 10_000
"""The number of events between two ledger snapshots. Folding that many takes some tenths of a second."""

_LEDGER: TypeAdapter[Ledger] = TypeAdapter(Ledger)

FORMAT = int.from_bytes(blake3(json.dumps([dtfm.__version__, _LEDGER.json_schema()]).encode()).digest(3))
"""It follows from the version and the ledger's fields: ledger snapshots with another one are passed over."""


def take(ledger: Ledger, sequence: int) -> LedgerSnapshot:
    """``ledger``, which is the fold of the events up to ``sequence``."""
    text = "\n".join(_lines(ledger))
    return LedgerSnapshot(sequence, FORMAT, _digest(sequence, text), text)


def read(snapshot: LedgerSnapshot) -> Ledger:
    """The inverse of ``take``. Raises ValueError if the snapshot is damaged or of another format."""
    if snapshot.format != FORMAT:
        raise ValueError(f"it has format {snapshot.format}, this dtfm writes {FORMAT}")
    if snapshot.digest != _digest(snapshot.sequence, snapshot.text):
        raise ValueError("it is damaged: its digest differs")
    first, *rest = snapshot.text.split("\n")
    try:
        ledger = _LEDGER.validate_json(first)
        return replace(ledger, reach=replace(ledger.reach, links=dict(map(_row, rest))))
    except (ValidationError, ValueError, TypeError) as error:
        raise ValueError(f"it cannot be read: {str(error).splitlines()[0]}") from None


def restore(store: Store) -> Ledger:
    """The fold of the whole log: the newest ledger snapshot that can be read, and the events after it. Raises StoreError."""
    for snapshot in store.snapshots():
        try:
            if snapshot.sequence > store.last:
                raise ValueError(f"the log ends with event {store.last}")
            ledger = read(snapshot)
        except ValueError as problem:
            log.warning("passed over the ledger snapshot of event %d: %s", snapshot.sequence, problem)
            continue
        return fold((record.event for record in store.read(snapshot.sequence)), ledger)
    return fold(record.event for record in store.read())


def _lines(ledger: Ledger) -> Iterator[str]:
    yield _LEDGER.dump_json(replace(ledger, reach=replace(ledger.reach, links={}))).decode()
    for source, row in ledger.reach.links.items():
        links = [
            [link.destination, link.latency_seconds, link.bandwidth, link.problem, link.way] for link in row.values()
        ]
        yield json.dumps([source, links])


def _row(line: str) -> tuple[str, dict[str, Link]]:
    source, links = json.loads(line)
    return source, {destination: Link(source, destination, *rest) for destination, *rest in links}


def _digest(sequence: int, text: str) -> str:
    return blake3(f"{sequence}\n{text}".encode()).hexdigest()

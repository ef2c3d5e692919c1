"""The story as of some event, kept in the store: a restart, the page and `watch` fold only the events after it.

It is a cache: the log alone is the truth, and an unreadable story snapshot is passed over. As text it is one line of JSON
without the links, then one line of links for each node, so that no single piece takes long to make.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

from blake3 import blake3
from pydantic import TypeAdapter, ValidationError

import dtfm
from dtfm.coordinator.log.events import Link
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.store.record import Record, Snapshot, read_log, read_snapshots
from dtfm.coordinator.view.story import Story

log = logging.getLogger(__name__)

EVERY = 2_000
"""The number of events between two story snapshots. Folding that many takes about a fifth of a second."""


@cache
def _adapter() -> TypeAdapter[Story]:
    return TypeAdapter(Story)


@cache
def story_format() -> int:
    """A name that follows from the version and the story's fields. Story snapshots with another name are passed over."""
    return int.from_bytes(blake3(json.dumps([dtfm.__version__, _adapter().json_schema()]).encode()).digest(3))


def take(story: Story) -> Snapshot:
    sequence, text = story.now.sequence, "\n".join(_lines(story))
    return Snapshot(sequence, story_format(), _digest(sequence, text), text)


def read(snapshot: Snapshot) -> Story:
    """The inverse of ``take``. Raises ValueError if the snapshot is damaged or of another format."""
    if snapshot.format != story_format():
        raise ValueError(f"it has format {snapshot.format}, this dtfm writes {story_format()}")
    if snapshot.digest != _digest(snapshot.sequence, snapshot.text):
        raise ValueError("it is damaged: its digest differs")
    return story_from(snapshot.text.split("\n"))


def story_from(lines: Sequence[str]) -> Story:
    """The story of a snapshot with these lines. Raises ValueError."""
    first, *rest = lines
    try:
        story = _adapter().validate_json(first)
        story.now.ledger = _with_links(story.now.ledger, dict(map(_row, rest)))
    except (ValidationError, ValueError, TypeError) as error:
        raise ValueError(f"it cannot be read: {str(error).splitlines()[0]}") from None
    fresh = Story()
    for part, example in ((story.now, fresh.now), (story.history, fresh.history)):
        for name in part.__slots__:
            if isinstance(read := getattr(part, name), deque):  # it has lost its bound
                setattr(part, name, deque(read, getattr(example, name).maxlen))
    return story


def newest(snapshots: Iterable[Snapshot]) -> Story:
    """The story of the first of the ``snapshots`` that can be read. If there is none, a story that has not begun."""
    for snapshot in snapshots:
        try:
            return read(snapshot)
        except ValueError as problem:
            log.warning("passed over the story snapshot of event %d: %s", snapshot.sequence, problem)
    return Story()


def story_of(snapshots: Iterable[Snapshot], read: Callable[[int], Iterable[Record]]) -> Story:
    """The story of the whole log. ``read`` returns its records after a number."""
    story = newest(snapshots)
    for record in read(story.now.sequence):
        story.add(record)
    return story


def story_in(url: str) -> Story:
    """The story of the log in this store. Raises StoreError."""
    return story_of(read_snapshots(url), partial(read_log, url))


def _lines(story: Story) -> Iterator[str]:
    ledger = story.now.ledger
    bare = replace(story, now=replace(story.now, ledger=_with_links(ledger, {})))
    yield _adapter().dump_json(bare).decode()
    for source, row in ledger.reach.links.items():
        links = [
            [link.destination, link.latency_seconds, link.bandwidth, link.problem, link.way] for link in row.values()
        ]
        yield json.dumps([source, links])


def _with_links(ledger: Ledger, links: dict[str, dict[str, Link]]) -> Ledger:
    return replace(ledger, reach=replace(ledger.reach, links=links))


def _row(line: str) -> tuple[str, dict[str, Link]]:
    source, links = json.loads(line)
    return source, {destination: Link(source, destination, *rest) for destination, *rest in links}


def _digest(sequence: int, text: str) -> str:
    return blake3(f"{sequence}\n{text}".encode()).hexdigest()

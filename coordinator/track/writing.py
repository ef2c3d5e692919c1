"""Writes a log's curves to trackers in one pass: ``dtfm-coordinator events --to``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.track.tracker import (
    Tracker,
    TrackerError,
    check_tracker,
    explained,
    open_tracker,
    put,
    tracked,
)
from dtfm.coordinator.view.so_far import SoFar
from dtfm.protos.run_file.trackers import Destination

MOST_UNFLUSHED = 1000
"""The number of events after which a tracker is flushed, unless each event is to be seen immediately."""


@dataclass(slots=True)
class Written:
    """The figures that a destination got. Its earlier ones do not count."""

    destination: Destination
    steps: int = 0
    evaluations: int = 0


async def write_curves(
    destinations: Sequence[Destination], records: AsyncIterator[Record], *, as_they_come: bool
) -> list[Written]:
    """Writes the curves of ``records``, a log from its beginning. Raises ValueError."""
    for destination in destinations:
        check_tracker(destination)
    so_far, written = SoFar(), [Written(destination) for destination in destinations]
    trackers: list[Tracker] = []
    with ExitStack() as stack:
        async for record in records:
            so_far.add(record)
            if not trackers:
                run = tracked(so_far.ledger)
                for destination in destinations:
                    with explained(destination):
                        trackers.append(open_tracker(destination, run))
                    stack.callback(_close, destination, trackers[-1])
            is_due = as_they_come or not record.sequence % MOST_UNFLUSHED
            for each, tracker in zip(written, trackers, strict=True):
                with explained(each.destination):
                    has = tracker.has
                    put(tracker, so_far, record)
                    if tracker.has > has:
                        each.steps += isinstance(record.event, ev.StepCommitted)
                        each.evaluations += isinstance(record.event, ev.Evaluated)
                    if is_due:
                        tracker.flush()
    if not trackers:
        raise TrackerError("the log is empty: the run has not begun")
    return written


def _close(destination: Destination, tracker: Tracker) -> None:
    with explained(destination):
        tracker.flush()
        tracker.close()

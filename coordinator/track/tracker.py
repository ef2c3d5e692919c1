"""A tracker's interface, and how to open one. A tracker's library is imported only when it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.track.settings import settings_of
from dtfm.coordinator.view.curves import Reading, reading
from dtfm.coordinator.view.published import for_anybody
from dtfm.coordinator.view.so_far import SoFar
from dtfm.installed import install_line
from dtfm.protos.run_file.trackers import Destination


class TrackerError(ValueError):
    """The tracker cannot be written to. The message names the cause and the fix."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """``id`` tells runs of the same name apart. ``settings``: the part of the run file that a tracker may show."""

    name: str
    id: str
    settings: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The run's name within a folder or a project."""
        return f"{self.name}-{self.id[:8]}"


class Tracker(Protocol):
    """An open tracker. It has the curves up to the log's event ``has`` (0: none). It gets the events after it, in order.
    Methods raise TrackerError, or the library's exceptions."""

    @property
    def has(self) -> int: ...

    def write(self, sequence: int, figures: Reading) -> None:
        """``sequence``: the event's number in the log."""

    def back_to(self, time: float, step: int) -> None:
        """Says that training went back to this step at this time: later steps do not count, and come again."""

    def flush(self) -> None:
        """Returns when all written figures are there."""

    def close(self) -> None: ...


def tracked(ledger: Ledger) -> TrackedRun:
    return TrackedRun(str(ledger.run.get("name", "run")), ledger.run_id, settings_of(ledger.run))


def check_tracker(destination: Destination) -> None:
    """Raises ValueError, with the fix, if a person has to mend something before the destination can be written to. Opens
    nothing."""
    _library_of(destination).check(destination.place)


def open_tracker(destination: Destination, run: TrackedRun) -> Tracker:
    """Opens the tracker. Raises ValueError, or the library's exceptions."""
    tracker: Tracker = _library_of(destination).Writer(destination.place, run)
    return tracker


def leave(destination: Destination) -> None:
    """Call it when this process ends although the tracker is not done: then its library does not hold up the end."""
    with suppress(TrackerError):  # without a library there is nothing to leave
        getattr(_library_of(destination), "leave", lambda: None)()


def put(tracker: Tracker, so_far: SoFar, record: Record) -> None:
    """Writes the record's part of the curves, unless the tracker has it. ``so_far`` has the record already."""
    if record.sequence <= tracker.has:
        return
    if isinstance(record.event, ev.RolledBack):
        tracker.back_to(record.time, record.event.step)
    elif (figures := reading(so_far, record)) is not None:
        tracker.write(record.sequence, figures)


@contextmanager
def explained(destination: Destination) -> Iterator[None]:
    """Turns any exception inside into a TrackerError that names the destination."""
    try:
        yield
    except Exception as error:  # a library may raise anything
        raise TrackerError(f"{destination}: {why(error)}") from None


def why(error: Exception) -> str:
    """One line for people."""
    first = next(iter(str(error).splitlines()), "")
    kind = type(error).__name__
    return for_anybody(first if isinstance(error, TrackerError) else f"{kind}: {first}" if first else kind)


def _library_of(destination: Destination) -> Any:
    kind = destination.kind
    try:
        return import_module(f"dtfm.coordinator.track.by_{kind}")
    except ImportError as error:
        raise TrackerError(f"{destination} needs a library ({error}); install it with: {install_line(kind)}") from None

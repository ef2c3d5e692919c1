"""The whole run as a story: now, and after any event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dtfm.coordinator.store.record import Record
from dtfm.coordinator.view.history import History
from dtfm.coordinator.view.so_far import SoFar


@dataclass(slots=True)
class Story:
    """A fold of the log. ``now`` is the run after the last record that was added."""

    now: SoFar = field(default_factory=SoFar)
    history: History = field(default_factory=History)

    def add(self, record: Record) -> None:
        self.now.add(record)
        self.history.add(record, self.now)

    def at(
        self,
        sequence: int,
        read: Callable[[int], Iterator[Record]],
        earlier: Callable[[int], SoFar] = lambda _: SoFar(),
    ) -> SoFar:
        """The run after that event, or after the nearest one that was added. ``read`` yields the records after a number.
        ``earlier`` returns the run after that event or an earlier one."""
        if sequence >= self.now.sequence:
            return self.now
        then = earlier(sequence)
        for record in read(then.sequence):
            if record.sequence > max(1, sequence):
                break
            then.add(record)
        return then

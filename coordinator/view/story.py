"""The whole run as it is told: as it is, and as it was after any event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dtfm.coordinator.store.record import Record
from dtfm.coordinator.view.history import History
from dtfm.coordinator.view.so_far import SoFar

MOST_KEPT = 64
"""The number of earlier states that are kept: from the nearest one the others are folded."""


@dataclass(slots=True)
class Story:
    """A fold of the log. ``now`` is the run after the last record that was added."""

    now: SoFar = field(default_factory=SoFar)
    history: History = field(default_factory=History)
    _kept: list[SoFar] = field(default_factory=list)
    _every: int = 256
    """The number of events between two states that are kept."""

    def add(self, record: Record) -> None:
        self.now.add(record)
        self.history.add(record, self.now.ledger)
        if record.sequence % self._every == 0:
            self._kept.append(self.now.copy())
            if len(self._kept) == MOST_KEPT:
                self._kept, self._every = self._kept[1::2], 2 * self._every

    def at(
        self,
        sequence: int,
        read: Callable[[int], Iterator[Record]],
        earlier: Callable[[int], SoFar] = lambda _: SoFar(),
    ) -> SoFar:
        """The run after that event, or after the nearest one that was added. ``read`` yields the records after a number, and
        ``earlier`` returns the run after that event or some before, where none is kept here."""
        if sequence >= self.now.sequence:
            return self.now
        then = next((kept.copy() for kept in reversed(self._kept) if kept.sequence <= sequence), None) or earlier(
            sequence
        )
        for record in read(then.sequence):
            if record.sequence > max(1, sequence):
                break
            then.add(record)
        return then

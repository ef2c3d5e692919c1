"""What may happen as often as others please is logged once a minute, and then by its number. Pure: the time is passed in."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

SECONDS = 60.0
"""The first of a kind is logged, and further ones are counted for so long."""

Kind = TypeVar("Kind", bound=Hashable)


class Repeated(Generic[Kind]):
    """Counts what happens, by kind. Each count ends with its minute, so there are as many as kinds that happen in one."""

    def __init__(self) -> None:
        self._counts: dict[Kind, tuple[float, int]] = {}  # since when, and how many came after the first

    def is_new(self, kind: Kind, now: float) -> bool:
        """Whether this is the first of its kind since its last count ended. Otherwise it is counted."""
        if kind in self._counts:
            since, count = self._counts[kind]
            self._counts[kind] = since, count + 1
            return False
        self._counts[kind] = now, 0
        return True

    def ended(self, now: float) -> list[tuple[Kind, int]]:
        """The counts that end now, of kinds of which more than one came."""
        over = [kind for kind, (since, _) in self._counts.items() if now - since >= SECONDS]
        counts = [(kind, self._counts.pop(kind)[1]) for kind in over]
        return [(kind, count) for kind, count in counts if count]

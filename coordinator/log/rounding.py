"""What audits have shown of how far apart honest devices' results are.

For each sort of comparison (what is compared, under which codec, between which kinds of devices) it is remembered who found
whose work how far from its own, where that counted as clean, or could not be settled. Nobody knows yet who of them is honest,
so that nothing is concluded from what one says: see `typical`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

from dtfm.coordinator.log.members import DeviceSeen

if TYPE_CHECKING:
    from dtfm.coordinator.log.trust import WorkAudited

MOST_SORTS = 256
"""Sorts of comparisons that are remembered. From then on that with the fewest audits is forgotten for each new one."""

MOST_ROWS = 256
"""Rows of one sort. From then on the oldest of those with the fewest audits is forgotten for each new one."""

LEAST_AUDITS = 16
"""From so many clean audits of a sort on, something follows from them."""

LEAST_PARTIES = 3
"""Parties that must have done these audits. So a liar and its friend cannot teach alone, whosever work it is."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The party ``by`` found work of the party ``of`` clean so many ``times``, and at most ``largest`` (a relative error) from
    its own. Parties are named by a hash."""

    by: str
    of: str
    times: int
    largest: float


Rounding = Mapping[str, tuple[Seen, ...]]
"""By sort (see `sort_of`), the one last heard of at the end; in each the rows, the newest at the end."""


def kind_of(device: DeviceSeen) -> str:
    """Devices of one kind mostly come to the same bits."""
    return f"{device.kind} {device.name}"


def sort_of(what: str, codec: str, kinds: Iterable[str]) -> str:
    """``what`` is compared, as in the event, between devices of two ``kinds``, whichever of them audits the other."""
    return " | ".join((what, codec, *sorted(kinds)))


def party_named(key_or_name: str) -> str:
    """How rows name a party, which is known by its key, or by its name where none is known."""
    return blake3(key_or_name.encode()).hexdigest(8)


def learned(rounding: Rounding, event: WorkAudited) -> Rounding:
    """With what one more audit says. One that came to something else, or whose devices are not known, says nothing."""
    if not (event.clean or event.tied) or len(event.kinds) != 2:
        return rounding
    by, of = party_named(event.by_key or event.by), party_named(event.key or event.node)
    sorts = dict(rounding)
    for what, codec in event.codecs.items():
        if what not in event.errors:
            continue
        rows = sorts.pop(sort := sort_of(what, codec, event.kinds), ())
        before = next((row for row in rows if (row.by, row.of) == (by, of)), Seen(by, of, 0, 0.0))
        now = Seen(by, of, before.times + 1, max(before.largest, event.errors[what]))
        kept = tuple(row for row in rows if row is not before)
        if len(kept) >= MOST_ROWS:
            fewest = min(kept, key=lambda row: row.times)
            kept = tuple(row for row in kept if row is not fewest)
        if len(sorts) >= MOST_SORTS:
            del sorts[min(sorts, key=lambda each: sum(row.times for row in sorts[each]))]
        sorts[sort] = (*kept, now)
    return sorts


def without(rounding: Rounding, key_or_name: str) -> Rounding:
    """Without what the party said, and what was said of it: it lies."""
    who = party_named(key_or_name)
    fewer = {sort: tuple(row for row in rows if who not in (row.by, row.of)) for sort, rows in rounding.items()}
    return {sort: rows for sort, rows in fewer.items() if rows}


def typical(rows: Iterable[Seen]) -> float | None:
    """The largest error that an honest party typically sees in honest work; None: too little is known.

    What a party typically sees is the lower median of the largest errors that it found, by whose work it was; of that the upper
    median over all parties. As long as more than half of the parties are honest, what the others do and say makes it neither
    smaller than what honest ones see of each other, which would accuse these, nor larger, which would let a lie pass.
    """
    by: dict[str, list[float]] = {}
    audits = 0
    for row in rows:
        by.setdefault(row.by, []).append(row.largest)
        audits += row.times
    if audits < LEAST_AUDITS or len(by) < LEAST_PARTIES:
        return None
    return statistics.median_high(statistics.median_low(largest) for largest in by.values())

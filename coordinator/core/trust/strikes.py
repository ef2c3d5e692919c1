"""What is held against members because audits came to nothing on their account, and how they work it off. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

WORKED_OFF_BY = 20
"""So many audits that come to something take one strike away: who is to blame for more than one in so many goes in the end,
however well it behaves in between."""

MOST_STRIKES = 8
"""So many strikes of a record are remembered, the last ones."""

MOST_RECORDS = 10_000
"""From so many records on the oldest is forgotten for each new one."""

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Strike:
    """In the attempt of this ``generation`` at ``step`` an audit came to nothing because of ``node``, as ``by`` say; none: the
    coordinator knows it itself. ``ended``: it ended the step before more were asked than ``by``, who came to something else."""

    generation: int
    step: int
    node: str
    by: tuple[str, ...] = ()
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """The ``strikes``, never none, and how many audits ``since`` the last one was worked off came to something."""

    strikes: tuple[Strike, ...]
    since: int = 0

    @property
    def attempts(self) -> int:
        """At steps, each with a strike."""
        return len({(strike.generation, strike.step) for strike in self.strikes})


def struck(records: Mapping[Key, Record], who: Key, strike: Strike) -> Mapping[Key, Record]:
    """With one strike more."""
    before = records.get(who, Record(()))
    record = replace(before, strikes=(*before.strikes, strike)[-MOST_STRIKES:])
    return dict([*((key, kept) for key, kept in records.items() if key != who), (who, record)][-MOST_RECORDS:])


def worked_off(records: Mapping[Key, Record], who: Key) -> Mapping[Key, Record]:
    """With one audit more that came to something."""
    if (record := records.get(who)) is None:
        return records
    record = replace(record, since=record.since + 1)
    if record.since == WORKED_OFF_BY:
        record = Record(record.strikes[1:])
    return {key: kept for key, kept in {**records, who: record}.items() if kept.strikes}

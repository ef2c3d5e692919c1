"""What events do to links and ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import (
    Carried,
    Ledger,
    Member,
)
from dtfm.protos import MEASURED_TOGETHER

Row = TypeVar("Row")

EXHAUSTED = 0.8
"""A connection limits its links if it carries less than this fraction of their sum."""


def with_links(
    links: Mapping[str, Mapping[str, ev.Link]], measured: Iterable[ev.Link]
) -> Mapping[str, Mapping[str, ev.Link]]:
    rows: dict[str, dict[str, ev.Link]] = {}
    for link in measured:
        row = rows.get(link.source)
        if row is None:
            row = rows[link.source] = dict(links.get(link.source, {}))
        before = row.get(link.destination)
        row[link.destination] = replace(link, way=before.way) if before is not None and not link.way else link
    return {**links, **rows}


def with_ways(ledger: Ledger, chosen: Iterable[ev.Way]) -> Ledger:
    ways = {source: dict(row) for source, row in ledger.ways.items()}
    links = []
    for way in chosen:
        row = ways.setdefault(way.source, {})
        row.pop(way.destination, None)
        if not way.is_direct:
            row[way.destination] = way
        if (link := ledger.links.get(way.source, {}).get(way.destination)) is not None:
            links.append(replace(link, way=way.name))
    return replace(
        ledger, ways={source: row for source, row in ways.items() if row}, links=with_links(ledger.links, links)
    )


def with_connection(members: Mapping[str, Member], measured: ev.LinksMeasured) -> Mapping[str, Member]:
    def carried(together: float | None, apart: list[ev.Link], before: Carried | None) -> Carried | None:
        if together is None:
            return before
        reached = sorted((link for link in apart if link.bandwidth > 0), key=lambda link: link.latency_seconds)
        whole = sum(link.bandwidth for link in reached[:MEASURED_TOGETHER])
        return Carried(together, least=together >= EXHAUSTED * whole)

    if measured.up is None and measured.down is None:
        return members
    node, member = measured.node, members[measured.node]
    up = carried(measured.up, [link for link in measured.links if link.source == node], member.up)
    down = carried(measured.down, [link for link in measured.links if link.destination == node], member.down)
    return {**members, node: replace(member, up=up, down=down)}


def broken_now(
    links: Mapping[str, Mapping[str, ev.Link]], broken: frozenset[tuple[str, str]], measured: Iterable[ev.Link]
) -> frozenset[tuple[str, str]]:
    pairs = {(min(link.source, link.destination), max(link.source, link.destination)) for link in measured}
    both = {(a, b): (links.get(a, {}).get(b), links.get(b, {}).get(a)) for a, b in pairs}
    now = {pair for pair, ways in both.items() if any(link is not None and link.bandwidth == 0 for link in ways)}
    return (broken - pairs) | now


def concerns_ready(ledger: Ledger, pairs: Iterable[tuple[str, str]]) -> bool:
    return any(ledger.members[a].ready and ledger.members[b].ready for a, b in pairs)


def but(row: Mapping[str, Row], node: str) -> Mapping[str, Row]:
    if node not in row:
        return row
    fewer = dict(row)
    del fewer[node]
    return fewer

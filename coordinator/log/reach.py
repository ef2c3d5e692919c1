"""Links and ways: how fast nodes reach each other, and by which way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeVar

from dtfm.coordinator.log.wording import name_first
from dtfm.protos import MEASURED_TOGETHER

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger

Cell = TypeVar("Cell")

Pair = tuple[str, str]
"""Two nodes in order of name."""

EXHAUSTED = 0.8
"""A connection limits its links if it carries less than this fraction of their sum."""


def pair_of(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)


def without_node(table: Mapping[str, Mapping[str, Cell]], node: str) -> Mapping[str, Mapping[str, Cell]]:
    """The table, by source and destination, without the node's row and column."""
    return {
        source: {name: cell for name, cell in row.items() if name != node} if node in row else row
        for source, row in table.items()
        if source != node
    }


@dataclass(frozen=True, slots=True)
class Link:
    """A directed link: latency one way in seconds, bandwidth in bytes per second. An unreachable destination has bandwidth 0
    and a ``problem``. ``way``: how the source reaches the destination, as in the wire's LinkReport; empty: not known."""

    source: str
    destination: str
    latency_seconds: float
    bandwidth: float
    problem: str = ""
    way: str = ""


@dataclass(frozen=True, slots=True)
class Way:
    """How the source reaches the destination. "loopback", "lan", "public" or "direct": by dialling. "dial-back": over connections
    that the destination lends to the source. "relay": over connections that the destination lends to ``relay``."""

    source: str
    destination: str
    way: str
    relay: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        return f"relay {self.relay}" if self.relay else self.way

    @property
    def is_direct(self) -> bool:
        return self.way not in ("dial-back", "relay")


@dataclass(frozen=True, slots=True)
class Carried:
    """The bandwidth of the line of a node's machine, in bytes per second. ``least``: the line may carry more, since links
    measured together were hardly slower than alone."""

    bandwidth: float
    least: bool = False


@dataclass(frozen=True, slots=True)
class Reach:
    """How members reach each other."""

    links: Mapping[str, Mapping[str, Link]] = field(default_factory=dict)
    """By source, then by destination."""
    broken: frozenset[Pair] = frozenset()
    """Pairs in which one node could not reach the other."""
    ways: Mapping[str, Mapping[str, Way]] = field(default_factory=dict)
    """By source, then by destination; direct ways are left out."""
    carried: Mapping[str, tuple[Carried | None, Carried | None]] = field(default_factory=dict)
    """By node, the bandwidth of its connection up and down; None: not measured."""
    changes: int = 0
    """The number of measurements so far that call for a new plan: a device or link that drifted, a link that broke, or a broken
    link that works again."""

    def changed(self, by: bool = True) -> Reach:
        return replace(self, changes=self.changes + by)

    def without(self, node: str) -> Reach:
        return Reach(
            links=without_node(self.links, node),
            broken=frozenset(pair for pair in self.broken if node not in pair),
            ways=without_node(self.ways, node),
            carried={name: each for name, each in self.carried.items() if name != node},
            changes=self.changes,
        )

    def with_links(self, measured: Iterable[Link]) -> Reach:
        rows: dict[str, dict[str, Link]] = {}
        for link in measured:
            row = rows.get(link.source)
            if row is None:
                row = rows[link.source] = dict(self.links.get(link.source, {}))
            before = row.get(link.destination)
            row[link.destination] = replace(link, way=before.way) if before is not None and not link.way else link
        return replace(self, links={**self.links, **rows})

    def with_broken(self, measured: Iterable[Link]) -> Reach:
        """With pairs broken or working again, as the links that were just ``measured`` say."""
        pairs = {pair_of(link.source, link.destination) for link in measured}
        both = {(a, b): (self.links.get(a, {}).get(b), self.links.get(b, {}).get(a)) for a, b in pairs}
        now = {pair for pair, ways in both.items() if any(link is not None and link.bandwidth == 0 for link in ways)}
        return replace(self, broken=(self.broken - pairs) | now)


@dataclass(frozen=True, slots=True)
class LinksMeasured:
    """``up`` and ``down``: bytes per second of the node's connection to, or from, several peers together; None: not measured this
    time. ``reason``: why a link has changed, if training itself showed it; otherwise empty."""

    node: str
    links: tuple[Link, ...]
    event: Literal["links_measured"] = "links_measured"
    up: float | None = None
    down: float | None = None
    reason: str = ""

    def apply(self, ledger: Ledger) -> Ledger:
        before = ledger.reach
        reach = before.with_links(self.links).with_broken(self.links)
        members = ledger.members
        surprise = any(members[a].ready and members[b].ready for a, b in reach.broken ^ before.broken)
        reach = reach.changed(by=bool(self.reason) or surprise)
        if self.up is None and self.down is None:
            return replace(ledger, reach=reach)
        near = {link.destination for link in self.links if link.way == "loopback"}
        far = [link for link in self.links if near.isdisjoint((link.source, link.destination))]
        if not far:  # loopback says nothing of the machine's line
            return replace(ledger, reach=reach)
        up, down = before.carried.get(self.node, (None, None))
        up = _carried(self.up, [link for link in far if link.source == self.node], up)
        down = _carried(self.down, [link for link in far if link.destination == self.node], down)
        return replace(ledger, reach=replace(reach, carried={**reach.carried, self.node: (up, down)}))

    def narrate(self) -> str:
        if self.reason:
            return f"{self.node}: {self.reason}"
        broken = [f"{link.source} to {link.destination} ({link.problem})" for link in self.links if link.problem]
        unusable = f"; unusable: {name_first(broken)}" if broken else ""
        return f"{len(self.links)} link{'s' if len(self.links) != 1 else ''} of {self.node} measured{unusable}"


@dataclass(frozen=True, slots=True)
class WaysChosen:
    ways: tuple[Way, ...]
    event: Literal["ways_chosen"] = "ways_chosen"

    def apply(self, ledger: Ledger) -> Ledger:
        reach = ledger.reach
        ways = {source: dict(row) for source, row in reach.ways.items()}
        links = []
        for way in self.ways:
            row = ways.setdefault(way.source, {})
            row.pop(way.destination, None)
            if not way.is_direct:
                row[way.destination] = way
            if (link := reach.links.get(way.source, {}).get(way.destination)) is not None:
                links.append(replace(link, way=way.name))
        ways = {source: row for source, row in ways.items() if row}
        return replace(ledger, reach=replace(reach.with_links(links), ways=ways))

    def narrate(self) -> str:
        said = [f"{way.source} reaches {way.destination} by {way.name}" for way in self.ways]
        why = next((f": {way.reason}" for way in self.ways if way.reason), "")
        return f"{name_first(said)}{why}"


def _carried(together: float | None, apart: list[Link], before: Carried | None) -> Carried | None:
    if together is None:
        return before
    reached = sorted((link for link in apart if link.bandwidth > 0), key=lambda link: link.latency_seconds)
    whole = sum(link.bandwidth for link in reached[:MEASURED_TOGETHER])
    return Carried(together, least=together >= EXHAUSTED * whole)

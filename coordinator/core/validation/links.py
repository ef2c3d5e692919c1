"""Checks of nodes' reports about links."""

from __future__ import annotations

from collections.abc import Collection

from dtfm.coordinator.core.refusal import check_number, require, shorten
from dtfm.coordinator.core.state.members import Dialled
from dtfm.coordinator.core.validation.admission import MAX_NODES
from dtfm.coordinator.log.events import Link
from dtfm.protos import control_pb2 as wire

MOST_BANDWIDTH = 1e13
_WAYS = ("", "loopback", "lan", "public")


def check_reached(report: wire.Reached, reporter: str, known: Collection[str]) -> dict[str, Dialled]:
    """By node, the result when the reporter dialled it. Drops nodes that have left. Raises Refused."""
    number = len(report.outcomes)
    require(number <= MAX_NODES, "outcomes", number, f"at most {MAX_NODES} of them")
    return {
        outcome.node: Dialled(_direct(outcome.way), shorten(outcome.problem))
        for outcome in report.outcomes
        if outcome.node in known and outcome.node != reporter
    }


def check_links(report: wire.LinkReport, reporter: str, known: Collection[str]) -> tuple[Link, ...]:
    """The measured links from and to the reporter. Drops links of nodes that have left. Raises Refused."""
    number = len(report.links)
    require(number <= 2 * MAX_NODES, "links", number, f"at most {2 * MAX_NODES} of them")
    require(len({(link.source, link.destination) for link in report.links}) == number, "links", number, "each once")
    links = []
    for link in report.links:
        its = link.source != link.destination and reporter in (link.source, link.destination)
        require(its, "link", f"{link.source} to {link.destination}", "from or to the node that reports it")
        check_number("latency_seconds", link.latency_seconds, 0, 3600)
        check_number("bandwidth", link.bandwidth, 0, MOST_BANDWIDTH)
        if link.source in known and link.destination in known:
            problem = shorten(link.problem)
            way = _direct(link.way) if link.source == reporter else ""
            links.append(Link(link.source, link.destination, link.latency_seconds, link.bandwidth, problem, way))
    return tuple(links)


def check_connection(report: wire.LinkReport) -> tuple[float | None, float | None]:
    """The bandwidth of the reporter's connection, up and down, in bytes per second; None: not measured. Raises Refused."""
    check_number("up", report.up, 0, MOST_BANDWIDTH)
    check_number("down", report.down, 0, MOST_BANDWIDTH)
    return report.up or None, report.down or None


def _direct(way: str) -> str:
    require(way in _WAYS, "way", way, f"one of {', '.join(_WAYS[1:])}, or nothing")
    return way

"""How long recoveries took, according to the log. Times come from the log: seconds of the wall clock."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

from tests.bench.rows import Row
from tests.cluster.launch import Event


def commits(events: Iterable[Event]) -> Iterator[Event]:
    return (event for event in events if event["event"] == "step_committed")


def until_commit_without(events: Sequence[Event], node: str, since: float) -> float:
    """Seconds from ``since``, when ``node`` failed, to the first commit without it. (A step that it had voted for
    may still be committed.) Raises StopIteration when there is no such commit."""
    without = next(e for e in commits(events) if e["time"] > since and node not in e["compute_seconds"])
    return float(without["time"]) - since


def contribution(events: Sequence[Event], node: str, since: float) -> tuple[float, float]:
    """When ``node`` first joined after ``since``, and when its first step after that was committed.
    Raises StopIteration when either did not happen."""
    joined = next(e["time"] for e in events if e["event"] == "node_joined" and e["node"] == node and e["time"] > since)
    first = next(e["time"] for e in commits(events) if e["time"] > joined and node in e["compute_seconds"])
    return float(joined), float(first)


def committed_between(events: Iterable[Event], begin: float, end: float) -> int:
    return sum(begin < event["time"] <= end for event in commits(events))


def mean_members(events: Sequence[Event], begin: float, end: float) -> float:
    """The average number of members between ``begin`` and ``end``."""
    present: set[str] = set()
    weighted, at = 0.0, begin
    for event in events:
        if event["event"] in ("node_joined", "node_left"):
            now = min(max(event["time"], begin), end)
            weighted += len(present) * (now - at)
            at = now
            (present.add if event["event"] == "node_joined" else present.discard)(event["node"])
    return (weighted + len(present) * (end - at)) / (end - begin)


def median_and_worst(measure: str, values: Sequence[float], unit: str, against: str, allowed: float) -> tuple[Row, Row]:
    """Two rows, both compared with the value ``allowed``, whose name is ``against``."""
    median, worst = statistics.median(values), max(values)
    return (
        Row(f"{measure}, median of {len(values)}", median, unit, against, median / allowed),
        Row(f"{measure}, worst", worst, unit, against, worst / allowed),
    )

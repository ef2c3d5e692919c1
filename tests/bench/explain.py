"""Where the time of a step went, according to its nodes' traces: the parts of a step add up to it.

The time of the busiest node has these parts: the wait for its first micro-batch (filling), computing, and waiting in between.
After its last micro-batch come the rest of the others' backward (draining), the rest of the exchange of gradients (reducing),
the coordinator's handling of the votes (committing), and the update of weights (applying).

The time of a link has three parts: before its first message had arrived, from then to its last message, and after that. (If its
bytes do not explain the second part, the link was idle, or slower than its rate.)
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Span:
    """One span of a trace, in seconds of the wall clock."""

    activity: str
    step: int
    began: float
    ended: float
    track: str = ""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one step, in seconds."""

    filling: float
    computing: float
    waiting: float
    draining: float
    reducing: float
    committing: float
    applying: float


@dataclass(frozen=True, slots=True)
class LinkParts:
    """The parts of one step for a link, in seconds."""

    before: float
    arriving: float
    after: float


P = TypeVar("P", Parts, LinkParts)


def read_trace(path: Path) -> list[Span]:
    """Reads a trace of ``dtfm-node join --trace``. If the node was killed, the last line may be cut off; it is left out."""
    spans = []
    tracks: dict[int, str] = {}
    for line in path.read_text().splitlines():
        try:
            event = json.loads(line.strip().strip("[],"))
        except ValueError:
            continue
        if event["ph"] == "M" and event["name"] == "thread_name":
            tracks[event["tid"]] = event["args"]["name"]
        if event["ph"] == "X":
            began, track = event["ts"] / 1e6, tracks.get(event.get("tid"), "")
            spans.append(Span(event["cat"], event["args"]["step"], began, began + event["dur"] / 1e6, track))
    return spans


def parts_of(step: int, nodes: Mapping[str, Sequence[Span]]) -> Parts:
    """The parts of ``step``, which begins when the first node has applied the step before. ``nodes``: each node's spans."""

    def of(spans: Iterable[Span], which: int, *activities: str) -> list[Span]:
        return [span for span in spans if span.step == which and span.activity in activities]

    everywhere = [span for spans in nodes.values() for span in spans]
    computed = {name: of(spans, step, "forward", "backward") for name, spans in nodes.items()}
    busiest = max(computed.values(), key=lambda spans: sum(span.ended - span.began for span in spans))
    began = min(span.ended for span in of(everywhere, step - 1, "apply"))
    first, last = min(span.began for span in busiest), max(span.ended for span in busiest)
    seconds = sum(span.ended - span.began for span in busiest)
    all_computed = max(span.ended for spans in computed.values() for span in spans)
    voted = max(max(span.ended for span in of(everywhere, step, "vote")), all_computed)
    applying = of(everywhere, step, "apply")
    committed = min(span.began for span in applying)
    return Parts(
        filling=first - began,
        computing=seconds,
        waiting=last - first - seconds,
        draining=all_computed - last,
        reducing=voted - all_computed,
        committing=committed - voted,
        applying=min(span.ended for span in applying) - committed,
    )


def link_parts_of(step: int, nodes: Mapping[str, Sequence[Span]], link: tuple[str, str]) -> LinkParts:
    """The parts of ``step`` for a link. The step lasts from when a first node has applied the step before until a first node
    has applied it. If no message came, for example over a link that carries state only, the whole step counts as before the
    first."""
    began, ended = (
        min(s.ended for spans in nodes.values() for s in spans if (s.activity, s.step) == ("apply", which))
        for which in (step - 1, step)
    )
    source, destination = link
    arrivals = [
        s.ended
        for s in nodes.get(destination, ())
        if (s.activity, s.step, s.track) == ("receive", step, f"from {source}")
    ]
    first, last = min(arrivals, default=ended), max(arrivals, default=ended)
    return LinkParts(before=first - began, arriving=last - first, after=ended - last)


def read_traces(folder: Path) -> Mapping[str, Sequence[Span]]:
    """By node, the spans of the traces (NODE.json) in ``folder``; nodes without spans are left out."""
    return {path.stem: spans for path in sorted(folder.glob("*.json")) if (spans := read_trace(path))}


def medians(parts: Sequence[P]) -> P:
    """The median of each part over the steps."""
    return type(parts[0])(*(statistics.median(getattr(p, field.name) for p in parts) for field in fields(parts[0])))

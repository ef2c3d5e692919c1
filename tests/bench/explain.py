"""Where a step's time went, from its nodes' traces (node/trace.py): the parts of an iteration add up to it.

The busiest node's time is divided: until its first micro-batch came (filling), what it computed, what it waited for in
between, and, once it was through, how long others had backward left (draining), gradients were still exchanged (reducing), the
coordinator took with the votes (committing), and nodes updated weights (applying).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Span:
    """As in a trace; seconds of the wall clock."""

    activity: str
    step: int
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Parts:
    """Of one step, in seconds."""

    filling: float
    computing: float
    waiting: float
    draining: float
    reducing: float
    committing: float
    applying: float


def read_trace(path: Path) -> list[Span]:
    """What ``dtfm-node join --trace`` wrote, also of a node that was killed: a last line that is cut off is left out."""
    spans = []
    for line in path.read_text().splitlines():
        try:
            event = json.loads(line.strip().strip("[],"))
        except ValueError:
            continue
        if event["ph"] == "X":
            began = event["ts"] / 1e6
            spans.append(Span(event["cat"], event["args"]["step"], began, began + event["dur"] / 1e6))
    return spans


def parts_of(step: int, nodes: Mapping[str, Sequence[Span]]) -> Parts:
    """The parts of ``step``, which begins when the first node has applied the one before; ``nodes``: their spans."""

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


def explain(folder: Path, steps: Sequence[int]) -> Parts:
    """Of each part the median over ``steps``, from the traces (NODE.json) in ``folder``. Nodes without a part have none."""
    nodes = {path.stem: spans for path in sorted(folder.glob("*.json")) if (spans := read_trace(path))}
    parts = [parts_of(step, nodes) for step in steps]
    return Parts(*(statistics.median(getattr(each, field.name) for each in parts) for field in fields(Parts)))

"""Each node's time in steps, which is most of what a step takes in the log. It stands beside the events. Of old steps the log
keeps it in all, not step by step."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from blake3 import blake3
from pydantic import TypeAdapter

from dtfm.coordinator.log.events import Event, StepCommitted, StepTimesSummed, to_text

_TIMES: TypeAdapter[dict[str, tuple[float, float]]] = TypeAdapter(dict[str, tuple[float, float]])

EVERY = 1000
"""The number of events whose steps are summed up together."""

KEPT = 10_000
"""The number of the last events that keep each node's time in each step."""


def due(last: int, summed_until: int) -> bool:
    """Whether steps are to be summed up. ``last``: the number of events."""
    return last >= summed_until + EVERY + KEPT


def summed(after: int, until: int, events: Iterable[Event]) -> StepTimesSummed:
    """What stands for the times of these events' steps."""
    steps, compute, wait, digest = 0, dict[str, float](), dict[str, float](), blake3()
    for event in events:
        if isinstance(event, StepCommitted):
            steps += 1
            digest.update(line(event))
            for total, times in ((compute, event.compute_seconds), (wait, event.wait_seconds)):
                for node, seconds in times.items():
                    total[node] = round(total.get(node, 0.0) + seconds, 3)
    return StepTimesSummed(after, until, steps, compute, wait, digest.hexdigest())


def without_times(event: StepCommitted) -> StepCommitted:
    """The event as it stands among the others, and as it is read once its times are summed up."""
    return replace(event, compute_seconds={}, wait_seconds={})


def times_to_text(event: StepCommitted) -> str:
    """What `without_times` leaves out."""
    both = {node: (seconds, event.wait_seconds.get(node, 0.0)) for node, seconds in event.compute_seconds.items()}
    return json.dumps(both, separators=(",", ":"))


def with_times(event: StepCommitted, text: str) -> StepCommitted:
    """The inverse of `without_times`, with `times_to_text`. Raises ValueError."""
    both = _TIMES.validate_json(text)
    compute, wait = ({node: each[n] for node, each in both.items()} for n in (0, 1))
    return replace(event, compute_seconds=compute, wait_seconds=wait)


def line(event: StepCommitted) -> bytes:
    """Of the event what a digest is made of, which summing up does not change."""
    return to_text(without_times(event)).encode() + b"\n"

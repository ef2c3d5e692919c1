"""The queues of the simulation, as binary heaps in arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.problem import Ints, Records

EVENT = np.dtype([("time", "f8"), ("made", "i8"), ("kind", "i8"), ("seat", "i8"), ("number", "i8")], align=True)
"""``made`` counts the events in order of creation; ``number`` is a micro-batch's or a layer's, according to ``kind``."""


@compiled()
def put_event(heap: Records, made: Ints, time: float, kind: int, seat: int, number: int) -> None:
    """Puts an event into the heap. ``made`` is int64 [2]: the number of events in the heap, and of events ever made."""
    place = made[0]
    made[0] += 1
    made[1] += 1
    while place and time < heap[(place - 1) >> 1].time:
        heap[place] = heap[(place - 1) >> 1]
        place = (place - 1) >> 1
    event = heap[place]
    event.time, event.made, event.kind, event.seat, event.number = time, made[1], kind, seat, number


@compiled()
def drop_first_event(heap: Records, made: Ints) -> None:
    """Removes heap[0], the earliest event, of several at the same time the one that was made first."""
    made[0] -= 1
    end = made[0]
    place, child = 0, 1
    while child < end:
        if child + 1 < end and _before(heap[child + 1], heap[child]):
            child += 1
        if not _before(heap[child], heap[end]):
            break
        heap[place] = heap[child]
        place, child = child, 2 * child + 1
    heap[place] = heap[end]


@compiled()
def _before(event: Any, other: Any) -> bool:
    if event.time == other.time:
        return event.made < other.made  # type: ignore[no-any-return]
    return event.time < other.time  # type: ignore[no-any-return]


@compiled()
def put_number(heap: Ints, begin: int, count: int, number: int) -> None:
    """Puts a number into the heap of ``count`` that begins at heap[begin]."""
    place = count
    while place and number < heap[begin + ((place - 1) >> 1)]:
        heap[begin + place] = heap[begin + ((place - 1) >> 1)]
        place = (place - 1) >> 1
    heap[begin + place] = number


@compiled()
def take_number(heap: Ints, begin: int, count: int) -> int:
    """Takes the least number from the heap of ``count`` that begins at heap[begin]."""
    end = count - 1
    least: int = heap[begin]
    last = heap[begin + end]
    place, child = 0, 1
    while child < end:
        if child + 1 < end and heap[begin + child + 1] < heap[begin + child]:
            child += 1
        if heap[begin + child] >= last:
            break
        heap[begin + place] = heap[begin + child]
        place, child = child, 2 * child + 1
    heap[begin + place] = last
    return least

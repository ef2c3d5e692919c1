"""How much memory torch allocates during some work."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.autograd.profiler import profile


def most_allocated(work: Callable[[], object]) -> int:
    """The most bytes of tensors that were allocated in this thread at any time during ``work``, also within torch's operations.
    Only one call at a time in a process."""
    return max(itertools.accumulate(_changes(work), initial=0))


def left_allocated(work: Callable[[], object]) -> int:
    """The bytes of tensors that were allocated during ``work`` and not freed. Only one call at a time in a process."""
    return sum(_changes(work))


def _changes(work: Callable[[], object]) -> list[int]:
    gc.collect()  # what is freed meanwhile would count, though it was allocated before
    with profile(profile_memory=True) as profiled:
        work()
    recorded: Any = profiled.kineto_results
    events = [event for event in _with_children(recorded.experimental_event_tree()) if "Allocation" in str(event.tag)]
    events.sort(key=lambda event: event.start_time_ns)
    return [event.extra_fields.alloc_size for event in events]


def _with_children(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _with_children(event.children)

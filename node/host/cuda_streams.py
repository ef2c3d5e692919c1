"""Waiting for a GPU, and running work beside its main stream. On a CPU all of this is a no-op."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch


def wait_until_computed(device: torch.device) -> None:
    """Waits, without spinning, until ``device`` has finished the work queued on this thread's stream."""
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))
        done.synchronize()


def after(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which GPU work waits for ``tensor`` only, on a side stream, not for whatever else is being computed.

    Call it in the thread that computes ``tensor``; enter it in the thread that reads it.
    """
    if not tensor.is_cuda:
        return nullcontext()
    stream = _side_stream(tensor.device)
    computed = torch.cuda.current_stream(tensor.device).record_event()

    @contextmanager
    def on_side_stream() -> Iterator[None]:
        with torch.cuda.stream(stream):
            stream.wait_event(computed)
            yield

    return on_side_stream()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

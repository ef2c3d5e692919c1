"""Waiting for a GPU, and running work beside its main stream. On a CPU all of this is a no-op."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch


def wait_until_computed(device: torch.device) -> None:
    """Waits, without spinning, until ``device`` has finished the work queued on this thread's stream."""
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))
        done.synchronize()


def after(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which GPU work waits for ``tensor`` only, on a side stream, not for whatever else is being computed.

    Call it in the thread that computes ``tensor``; enter it in the thread that reads it, as often as that wants to.
    """
    if not tensor.is_cuda:
        return nullcontext()
    return _OnSideStream(tensor.device)


class _OnSideStream(AbstractContextManager[object]):
    def __init__(self, device: torch.device) -> None:
        self._side = _side_stream(device)
        self._computed = torch.cuda.current_stream(device).record_event()
        self._entered: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> None:
        self._entered = torch.cuda.stream(self._side)
        self._entered.__enter__()  # type: ignore[no-untyped-call]
        self._side.wait_event(self._computed)

    def __exit__(self, *raised: Any) -> None:
        self._entered.__exit__(*raised)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

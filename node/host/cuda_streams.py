"""Waiting for a GPU, timing it, and running work beside its main stream. A CPU is never waited for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch


def wait_until_computed(device: torch.device) -> None:
    """Waits, without spinning, until ``device`` has finished the work queued on this thread's stream."""
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))
        done.synchronize()


def brought(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor``, which is in the host's memory, on ``device``; from pinned memory, or the host would wait for what is queued."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class DeviceWork:
    """What one thread queues on its stream of ``device``, piece by piece: how long the device takes for it, and how far it is
    behind. A CPU is never behind."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queued: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self.seconds = 0.0
        """That the device took for the pieces that are done; on a GPU, those that were waited for."""

    @contextmanager
    def piece(self) -> Iterator[None]:
        """A context in which a piece is queued, or on a CPU done."""
        if self._device.type != "cuda":
            began = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - began
            return
        stream = torch.cuda.current_stream(self._device)
        begin = stream.record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        yield
        end = stream.record_event(torch.cuda.Event(enable_timing=True, blocking=True))  # type: ignore[no-untyped-call]
        self._queued.append((begin, end))

    def wait(self, but: int = 0) -> None:
        """Returns when all pieces but the last ``but`` are done. Does not spin."""
        while len(self._queued) > but:
            begin, end = self._queued.popleft()
            end.synchronize()
            self.seconds += begin.elapsed_time(end) / 1000


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

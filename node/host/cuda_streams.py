"""Waiting for a GPU, timing it, and running work beside its main stream. A CPU is never waited for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch

from dtfm.kernels.transfer import pinned


def wait_until_computed(device: torch.device) -> None:
    """Waits, without spinning, until ``device`` has finished the work queued on this thread's stream."""
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))
        done.synchronize()


def brought(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor``, in the host's memory, on ``device``. It goes through pinned memory: otherwise the host would wait."""
    if device.type != "cuda":
        return tensor.to(device)
    flat = pinned(tensor.nbytes).view(tensor.dtype)
    return flat.view(tensor.shape).copy_(tensor).to(device, non_blocking=True)


class DeviceWork:
    """Work that one thread queues on its stream of ``device``, piece by piece: how long the device takes for it, and how far
    the device is behind. A CPU is never behind."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queued: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self.seconds = 0.0
        """The device's time for the finished pieces; on a GPU, for the pieces that were waited for."""

    @contextmanager
    def piece(self) -> Iterator[None]:
        """A context around queueing one piece; on a CPU, around computing it."""
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


#: Makes a context for running GPU work on a side stream. In any thread, any number of times.
Beside = Callable[[], AbstractContextManager[object]]


def after(device: torch.device, *, apart: bool = False) -> Beside:
    """Contexts for GPU work that waits for the work that this thread has queued on its stream of ``device`` so far, not for
    later work. ``apart``: no other side work waits for this work either."""
    if device.type != "cuda":
        return nullcontext
    side = torch.cuda.Stream(device) if apart else _side_stream(device)  # type: ignore[no-untyped-call]
    computed = torch.cuda.current_stream(device).record_event()

    @contextmanager
    def beside() -> Iterator[None]:
        with torch.cuda.stream(side):
            side.wait_event(computed)
            yield

    return beside


def wait_beside(device: torch.device) -> None:
    """Waits, without spinning, until ``device`` has finished all work on its side stream."""
    if device.type == "cuda":
        with torch.cuda.stream(_side_stream(device)):
            wait_until_computed(device)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

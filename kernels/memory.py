"""Reuses memory: the next large tensor gets the memory of a tensor that is no longer used.

The system zeroes every page of fresh memory, which costs as much as decoding into it. glibc's malloc also keeps freed memory,
but only in pieces of up to 32 MiB.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALLEST_BYTES = 1 << 20
"""Smaller pieces are left to the allocator."""
KEPT_BYTES = 256 << 20
"""The most bytes of unused blocks to keep."""
GIVE_BACK_PAUSE = 1000
"""The least time between two rounds of giving memory back, as a multiple of one round's time. Filling 300 MiB again took eight
times as long as giving it back (0.22 s, 0.03 s). So both together take less than 1 % of the time."""


def _from_the_system(size: int) -> NDArray[np.uint8]:
    return np.empty(size, np.uint8)


class _Loan:
    """A block in use. NumPy refers to it while any view of it is alive, torch tensors and memoryviews included."""

    def __init__(self, memory: Memory, block: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._block = block
        self.__array_interface__: dict[str, Any] = block.__array_interface__

    def __del__(self) -> None:
        self._memory._give_back(self._block)


class Memory:
    """Keeps up to ``kept`` bytes of unused blocks. ``fresh`` makes the blocks: uninitialised, 1-D. Thread-safe.

    ``remembered`` raises this limit by the most bytes that were in use at one time in the last ``remembered`` seconds (or twice
    that). So the next step finds the blocks that one step has freed. All blocks together take at most that peak, plus ``kept``.
    """

    def __init__(
        self,
        kept: int = KEPT_BYTES,
        fresh: Callable[[int], NDArray[np.uint8]] = _from_the_system,
        remembered: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = kept
        self._fresh = fresh
        self._remembered = remembered
        self._clock = clock
        self._made = 0  # bytes of all blocks, used and unused; whoever changes it has the lock
        self._peaks = (
            0,
            0,
        )  # the most bytes in use at a time, in this span of ``remembered`` seconds and in the one before
        self._span_began = clock()
        self._free: list[
            NDArray[np.uint8]
        ] = []  # least recently used first; a thread that takes one out holds the lock
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        return sum(block.nbytes for block in self._free)

    def take(self, size: int) -> NDArray[np.uint8]:
        """``size`` uninitialised bytes, 1-D. They come back by themselves when nothing refers to them."""
        if size < SMALLEST_BYTES:
            return np.empty(size, np.uint8)
        with self._lock:
            fitting = [n for n, block in enumerate(self._free) if size <= block.nbytes <= 2 * size]
            best = min(fitting, key=lambda n: self._free[n].nbytes, default=None)
            block = self._free.pop(best) if best is not None else None
            self._made += size if block is None else 0
            self._note_use()
            self._drop()
        if block is None:
            try:
                block = self._fresh(size)
            except BaseException:
                with self._lock:
                    self._made -= size
                raise
        loan = _Loan(self, block)
        return np.asarray(loan)[:size]

    def forget(self) -> None:
        """Frees all unused blocks."""
        with self._lock:
            while self._free:
                self._made -= self._free.pop().nbytes

    def _give_back(self, block: NDArray[np.uint8]) -> None:
        """Puts the block among the unused ones. If the lock is held, does nothing else: the garbage collector may call this
        anywhere, also within `take`."""
        self._free.append(block)
        if self._lock.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._lock.release()

    def _note_use(self) -> None:
        """Remembers how much is in use now, if it is the most in this span. The lock is held."""
        if not self._remembered:
            return
        now, used = self._clock(), self._made - self.free_bytes
        mine, before = self._peaks
        if now - self._span_began >= self._remembered:
            mine, before = used, mine if now - self._span_began < 2 * self._remembered else 0
            self._span_began = now
        self._peaks = max(mine, used), before

    def _drop(self) -> None:
        """Drops the longest unused blocks if there are too many. The lock is held."""
        while self.free_bytes > self._most and self._made > max(self._peaks):
            self._made -= self._free.pop(0).nbytes


MEMORY = Memory()
"""The memory of this process."""


class _GivingBack:
    """Gives freed memory back to the system: the blocks that MEMORY keeps, and the memory that malloc keeps between pieces in
    use. The latter grows from step to step. Memory is given back seldom, because the system must zero the pages for the next
    use."""

    def __init__(self) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
        self._trim = trim  # glibc only
        self._next = 0.0

    def __call__(self, *, now: bool = False) -> bool:
        """Gives memory back if it is time, or ``now``. Returns whether it did."""
        began = time.monotonic()
        if not now and began < self._next:
            return False
        MEMORY.forget()
        if self._trim is not None:
            self._trim(0)
        ended = time.monotonic()
        self._next = ended + GIVE_BACK_PAUSE * (ended - began)
        return True


give_back = _GivingBack()

"""Memory that is used again: what a tensor's last user lets go of, the next large tensor gets.

Memory fresh from the system costs as much as decoding into it: the kernel zeroes every page first. glibc's malloc keeps what
is freed too, but only in pieces up to 32 MiB.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALLEST_BYTES = 1 << 20
"""Below this any allocator does."""
KEPT_BYTES = 256 << 20
GIVE_BACK_PAUSE = 1000
"""So many times what giving back took passes before the next time. To fill 300 MiB anew took eight times as long as to give
them back (0.22 s, 0.03 s), so both together cost less than 1 % of the time."""


class _Loan:
    """A block that is out; NumPy holds it for as long as any view of it is alive, torch's and memoryviews included."""

    def __init__(self, memory: Memory, block: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._block = block
        self.__array_interface__: dict[str, Any] = block.__array_interface__

    def __del__(self) -> None:
        self._memory._give_back(self._block)


class Memory:
    """Keeps up to ``kept`` bytes of blocks that nobody uses any more. From any thread."""

    def __init__(self, kept: int = KEPT_BYTES) -> None:
        self._most = kept
        self._free: list[NDArray[np.uint8]] = []  # least recently used first
        self._lock = threading.RLock()  # a loan may end while its own thread takes another

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return sum(block.nbytes for block in self._free)

    def take(self, size: int) -> NDArray[np.uint8]:
        """``size`` bytes, 1-D, with anything in them. They come back by themselves once nothing refers to them."""
        if size < SMALLEST_BYTES:
            return np.empty(size, np.uint8)
        with self._lock:
            fitting = [n for n, block in enumerate(self._free) if size <= block.nbytes <= 2 * size]
            best = min(fitting, key=lambda n: self._free[n].nbytes, default=None)
            block = self._free.pop(best) if best is not None else None
        loan = _Loan(self, np.empty(size, np.uint8) if block is None else block)
        return np.asarray(loan)[:size]

    def forget(self) -> None:
        """Lets go of all blocks that nobody uses."""
        with self._lock:
            self._free.clear()

    def _give_back(self, block: NDArray[np.uint8]) -> None:
        with self._lock:
            self._free.append(block)
            while self._free and self.free_bytes > self._most:
                self._free.pop(0)


MEMORY = Memory()
"""This process's."""


class _GivingBack:
    """Gives memory that this process has freed back to the system: what MEMORY keeps, and what malloc does between pieces that
    are in use, which grows from step to step. Once in a while, as the next use must have it zeroed again."""

    def __init__(self) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
        self._trim = trim  # of glibc
        self._next = 0.0

    def __call__(self, *, now: bool = False) -> bool:
        """Does it if it is time to, or ``now``; whether it did."""
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

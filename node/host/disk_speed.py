"""How fast a disk is written and read. The system's cache in memory does not count."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

_PIECE = 4 << 20


def measure_disk(folder: Path, size: int) -> tuple[float, float]:
    """Writes ``size`` bytes to an unnamed file in ``folder``, and reads them. Returns the bytes per second of both. Writing
    counts until the bytes are on the disk (fsync). Raises OSError."""
    piece = os.urandom(_PIECE)  # some disks compress
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.perf_counter()
        for _ in range(size // _PIECE):
            file.write(piece)
        os.fsync(file.fileno())
        written = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        into = bytearray(_PIECE)
        began = time.perf_counter()
        total = 0
        while count := file.readinto(into):
            total += count
        return total / written, total / (time.perf_counter() - began)

"""How busy other programs keep this machine's cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

STAT = Path("/proc/stat")


class OtherWork:
    """Measures the share of the cores that other processes have used since the last call, or since it was made."""

    def __init__(self, read: Callable[[], tuple[float, float] | None] = lambda: cores_used()) -> None:
        self._read = read
        self._before = self._now()

    def share(self) -> float:
        """From 0 to 1. If the kernel does not tell, its load in the last minute counts."""
        before, self._before = self._before, self._now()
        if before is None or self._before is None:
            return min(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0)
        used, whole = (now - then for now, then in zip(self._before, before, strict=True))
        return min(max(used / whole, 0.0), 1.0) if whole > 0 else 0.0

    def _now(self) -> tuple[float, float] | None:
        cores = self._read()
        return None if cores is None else (cores[0] - time.process_time(), cores[1])


def cores_used(stat: Path = STAT) -> tuple[float, float] | None:
    """The seconds that all cores together have been busy since the machine started, and the seconds that passed on them. None
    if the kernel does not say so. See proc_stat(5)."""
    try:
        name, *columns = stat.read_text().split("\n", 1)[0].split()
        user, nice, system, idle, waiting, *others = map(int, columns[:8])  # guests are in the first two
    except (OSError, ValueError):
        return None
    if name != "cpu":
        return None
    busy = user + nice + system + sum(others)
    each = os.sysconf("SC_CLK_TCK")
    return busy / each, (busy + idle + waiting) / each

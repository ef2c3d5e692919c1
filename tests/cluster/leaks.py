"""Which processes there are and what they hold, read from /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path

LOOKS = 20

_PAGE = os.sysconf("SC_PAGE_SIZE")


def processes_in(folder: Path) -> list[str]:
    """The command lines of the processes whose working folder is ``folder`` or is inside it."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and (process / "cwd").resolve().is_relative_to(folder):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended, or is not ours
    return found


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def open_files(pid: int) -> int:
    """Without TCP connections: the fewest within a second, as one may just begin or end, or a file be open for a moment."""
    found = []
    for _ in range(LOOKS):
        found.append(len(os.listdir(f"/proc/{pid}/fd")) - connections(pid))
        time.sleep(1 / LOOKS)
    return min(found)


def connections(pid: int) -> int:
    """Established TCP connections."""
    established = set()
    for protocol in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{protocol}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "01":
                established.add(f"socket:[{fields[9]}]")
    held = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held.append(os.readlink(file))
        except OSError:
            continue  # it has been closed
    return sum(name in established for name in held)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def peak_bytes(pid: int) -> int:
    """The most memory that was ever resident."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024

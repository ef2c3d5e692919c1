"""A sign of life on disk, for supervisors: a node's own report, and whether it still gives one."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dtfm.protos.identity.private_files import state_folder

EVERY_SECONDS = 5.0
"""Seconds between two signs."""
STALE_SECONDS = 60.0
"""A node whose last sign is older than this hangs."""
MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Pulse:
    """A node's report. ``problem``: why it does not take part; empty: it takes part, or waits to. ``said``: its status line."""

    node: str
    pid: int
    at: float
    """In seconds since 1970."""
    problem: str = ""
    said: str = ""

    def trouble(self, now: float, is_alive: Callable[[int], bool]) -> str:
        """Why the node is not healthy; empty: it is."""
        if not is_alive(self.pid):
            return f"its process {self.pid} is gone"
        if now - self.at > STALE_SECONDS:
            return f"it has said nothing for {now - self.at:.0f} seconds"
        return self.problem


def pulse_folder() -> Path:
    return state_folder() / "pulse"


@asynccontextmanager
async def pulse(node: str, problem: Callable[[], str], line: Callable[[], str]) -> AsyncIterator[None]:
    """A context that gives signs of life. A sign that cannot be written harms nothing."""
    file = pulse_folder() / f"{node}.json"
    forget_the_dead()
    beating = asyncio.create_task(_beat(file, node, problem, line))
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.wait([beating])
        if any(sign.pid == os.getpid() for sign in pulses(node)):  # else another run's node has taken the name here
            with suppress(OSError):
                file.unlink(missing_ok=True)


async def _beat(file: Path, node: str, problem: Callable[[], str], line: Callable[[], str]) -> None:
    while True:
        with suppress(OSError):
            write(file, Pulse(node, os.getpid(), time.time(), problem(), line()))
        await asyncio.sleep(EVERY_SECONDS)


def write(file: Path, sign: Pulse) -> None:
    """Writes the sign. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    half = file.with_suffix(".new")
    half.write_text(json.dumps(asdict(sign)))
    half.replace(file)


def pulses(node: str = "") -> Iterator[Pulse]:
    """The last signs of all nodes of this user here, or of one node. Unreadable signs are passed over."""
    for file in sorted(pulse_folder().glob("*.json")):
        found = None
        with suppress(OSError, ValueError, TypeError), file.open() as opened:
            found = Pulse(**json.loads(opened.read(MOST_BYTES)))
        if found is not None and node in ("", found.node):
            yield found


def forget_the_dead() -> None:
    """Deletes the signs of nodes whose processes are gone. A sign with this process's number is from an earlier process: in
    containers numbers repeat."""
    for each in pulses():
        if each.pid == os.getpid() or not is_alive(each.pid):
            with suppress(OSError):
                (pulse_folder() / f"{each.node}.json").unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Whether a process with this number exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True

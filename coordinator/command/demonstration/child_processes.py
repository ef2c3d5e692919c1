"""The demo's nodes: child processes on this machine. None of them outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

TAIL_LINES = 15
"""Lines of a failed node's output that are shown."""
TERM_SECONDS = 3.0
"""Seconds between SIGTERM and SIGKILL."""
GIVE_UP_SECONDS = 20.0
"""Seconds after which nodes end by themselves when the demo was killed outright."""


@dataclass(slots=True)
class Child:
    """One node's process. ``log`` is the file that gets its output."""

    node: str
    process: asyncio.subprocess.Process
    log: Path
    _output: IO[bytes]

    def tail(self) -> str:
        """The last lines of the node's output."""
        self._output.flush()
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


class Children:
    """Starts and stops the nodes: an async context manager that leaves none running.

    On exit, nodes that still run get SIGTERM, then SIGKILL. Each node has a process group of its own, so that its own
    children end with it and Ctrl-C in a terminal does not reach it directly.
    """

    def __init__(self, invitation: str, folder: Path, threads: int, device: str) -> None:
        self._folder = folder
        self._threads = threads
        self._device = device
        self._environment = {
            # What the user has set for nodes of theirs, like DTFM_LISTEN, is not meant for these.
            **{name: value for name, value in os.environ.items() if not name.startswith("DTFM_")},
            "OMP_NUM_THREADS": str(threads),
            "DTFM_INVITATION": invitation,
            "XDG_STATE_HOME": str(folder / "state"),  # their keys are of no use afterwards
        }
        self.running: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self, node: str, when_gone: Callable[[Child, int], None]) -> None:
        """Starts ``node``; ``when_gone`` is called with its exit code when it ends."""
        log = self._folder / f"{node}.log"
        output = log.open("wb")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "dtfm.node.cli", "join", "--id", node),
            *("--device", self._device, "--threads", str(self._threads), "--verbose"),
            *("--give-up-after", str(GIVE_UP_SECONDS)),
            *("--snapshots", str(self._folder / "snapshots")),
            # Whoever wrote the run file has started the demo.
            *(word for place in ("/", "hf:*", "http://*", "https://*") for word in ("--allow-data", place)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=self._environment,
            start_new_session=True,
        )
        child = Child(node, process, log, output)
        self.running.append(child)
        self._watchers.append(asyncio.create_task(_watch(child, when_gone)))

    async def finish(self, seconds: float) -> None:
        """Waits at most ``seconds`` for all nodes to end by themselves."""
        waits = [asyncio.create_task(child.process.wait()) for child in self.running]
        if waits:
            _, pending = await asyncio.wait(waits, timeout=seconds)
            for wait in pending:
                wait.cancel()

    async def __aenter__(self) -> Children:
        return self

    async def __aexit__(self, *_: object) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, 5.0)):
            for child in self.running:
                if child.process.returncode is None:
                    _signal_group(child.process.pid, number)
            await self.finish(seconds)
        for child in self.running:
            _signal_group(child.process.pid, signal.SIGKILL)  # its own children, if it left any
            child._output.close()


async def _watch(child: Child, when_gone: Callable[[Child, int], None]) -> None:
    when_gone(child, await child.process.wait())


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)

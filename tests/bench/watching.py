"""Whether onlookers delay commits: ``python -m tests.bench.watching [--nodes 200] [--watchers 60] [--pages 20] [--json]``.

``dtfm-coordinator serve`` runs on one core. Nodes without models, each with its own stream, take two seconds for a step: the
rest of a step's time is the coordinator's part. Steps are timed first while nobody looks on. Then they are timed with
``--watchers`` `watch` commands, and ``--pages`` pages that fetch the state at each event. These share the other core with the
nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dtfm.coordinator.command.client import ask, told
from tests.bench.coordinator import environment, percentile
from tests.bench.crowd import Crowd
from tests.bench.rows import Row, show

STEP_SECONDS = 2.0
STEPS = 15
"""Steps to time with onlookers, and without."""
MICRO_BATCH, GLOBAL_BATCH = 2, 2048
JOINS_PER_SECOND = 8


class Serving:
    """The coordinator's events so far."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.events: list[dict[str, Any]] = []

    async def until(self, event: str, times: int = 1) -> dict[str, Any]:
        """The ``times``-th event of this name."""
        assert self._process.stdout is not None
        while sum(each["event"] == event for each in self.events) < times:
            self.events.append(json.loads(await self._process.stdout.readline()))
        return [each for each in self.events if each["event"] == event][times - 1]

    async def late(self) -> list[float]:
        """For each of the next STEPS steps, the seconds that it took longer than its nodes."""
        before = sum(each["event"] == "step_committed" for each in self.events)
        await self.until("step_committed", before + STEPS)
        steps = [each for each in self.events if each["event"] == "step_committed"][-STEPS:]
        return [step["seconds"] - STEP_SECONDS for step in steps]


@asynccontextmanager
async def started(*command: str, core: int) -> AsyncIterator[Process]:
    python = [sys.executable, "-c", f"import os, runpy, sys; os.sched_setaffinity(0, {{{core}}}); sys.argv.pop(0); "
              "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"]  # fmt: skip
    process = await asyncio.create_subprocess_exec(*python, *command, stdout=PIPE, env=environment(), limit=1 << 24)
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def rows(nodes: int, watchers: int, pages: int) -> list[Row]:
    first, other = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run.toml"
        run.write_text(
            f"[train]\nsteps = 100000\nglobal_batch = {GLOBAL_BATCH}\nmicro_batch = {MICRO_BATCH}\nevaluate_every = 0\n"
            f'[cluster]\nnodes = {nodes}\nstages = 1\n[checkpoint]\nuri = "{name}/checkpoints"\nevery = 0\n'
        )
        serve = ["dtfm.coordinator.cli", "serve", str(run), "--store", f"sqlite:///{name}/dtfm.db"]
        options = ["--listen", "127.0.0.1:0", "--web", "127.0.0.1:0", "--json"]
        async with started(*serve, *options, core=first) as process:
            serving = Serving(process)
            listening = await serving.until("listening")
            address, page = listening["address"], listening["page"]
            invited = await ask(address, "Invite", role="node", seconds=3600, uses=nodes)
            async with Crowd(invited.invitation, MICRO_BATCH, STEP_SECONDS) as crowd:
                await crowd.join([f"node-{number:04d}" for number in range(nodes)], nodes / JOINS_PER_SECOND)
                await serving.until("step_committed", 3)
                alone = await serving.late()
                looking = ["tests.bench.watching", "--look", address, page, str(watchers), str(pages)]
                async with started(*looking, core=other) as onlookers:
                    assert onlookers.stdout is not None
                    await onlookers.stdout.readline()  # all look on
                    watched = await serving.late()
    found = {
        f"a step of {nodes} nodes, nobody looks on": alone,
        f"with {watchers} watchers and {pages} pages": watched,
    }
    return [
        row
        for what, late in found.items()
        for row in (
            Row(f"{what}: median", statistics.median(late) * 1e3, "ms more than its nodes take"),
            Row(f"{what}: 90th percentile", percentile(late, 0.9) * 1e3, "ms"),
        )
    ]


async def look(address: str, page: str, watchers: int, pages: int) -> None:
    """Looks on until it is ended. Says so when everybody has seen something."""
    os.nice(19)  # elsewhere they are other machines, and take nothing from the nodes
    seen = asyncio.Semaphore(0)

    async def watch() -> None:
        first = True
        async for _ in told(address):
            if first:
                seen.release()
            first = False

    async def read() -> None:
        place = urlsplit(page)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(f"GET /news HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
        first = True
        while line := await reader.readline():
            if line.startswith(b"data:"):
                await asyncio.to_thread(lambda: urllib.request.urlopen(f"{page}state").read())
                if first:
                    seen.release()
                first = False

    looking = [
        asyncio.create_task(each) for each in (*(watch() for _ in range(watchers)), *(read() for _ in range(pages)))
    ]
    for _ in looking:
        await seen.acquire()
    print("all look on", flush=True)
    await asyncio.gather(*looking)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--watchers", type=int, default=60)
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--look", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.look:
        address, page, watchers, pages = arguments.look
        asyncio.run(look(address, page, int(watchers), int(pages)))
        return
    show(
        "The coordinator on one core",
        asyncio.run(rows(arguments.nodes, arguments.watchers, arguments.pages)),
        arguments.json,
    )


if __name__ == "__main__":
    main()

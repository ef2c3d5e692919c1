"""The coordinator that coordinator.py measures, on one core: ``python -m tests.bench.timed_coordinator FOLDER CORE``.

It prints its events as JSON lines, each with its time, and at the end when it took each heartbeat.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.service.first_access import node_invitation
from dtfm.coordinator.service.server import Server
from dtfm.coordinator.service.startup import open_run, serve_until_over
from dtfm.coordinator.store.store import Store
from dtfm.protos.identity.credentials import make_key
from dtfm.protos.run_file.run_file import RunFile, read_run_file


class TimedServer(Server):
    """``beats``: for each heartbeat, when it was taken and how long before it was sent, in seconds."""

    def _carry_out(self, command: t.Command) -> None:
        super()._carry_out(command)
        if isinstance(command, t.PlanWanted):
            _say("plan_wanted")

    def __init__(self, store: Store, run: RunFile) -> None:
        state, story, self.first = open_run(store, run)
        super().__init__(state, store, story, make_key())
        self.beats: list[tuple[float, float]] = []

    async def _handle(self, event: t.Input) -> None:
        await super()._handle(event)
        if isinstance(event, t.Planned):
            _say("planned")
        if isinstance(event, t.Heard) and event.message.WhichOneof("message") == "heartbeat":
            now = time.monotonic_ns()
            self.beats.append((now / 1e9, (now - event.message.heartbeat.count) / 1e9))


async def serve(folder: Path) -> None:
    with Store(f"sqlite:///{folder}/dtfm.db", write=True) as store:
        server = TimedServer(store, read_run_file(folder / "run.toml"))
        server.log.on_event(lambda record: _say(record.event.event))
        port = await server.bind("127.0.0.1", 0)
        server.addresses = (f"127.0.0.1:{port}",)
        made, secret = node_invitation(time.time(), 1000, "the crowd")
        server.begin_with([made])
        await server.start()
        invitation = server.invitation(made.invitation, secret)
        print(json.dumps({"event": "listening", "invitation": invitation}), flush=True)
        await serve_until_over(server, [*server.first, made])
        print(json.dumps({"event": "beats", "beats": server.beats}), flush=True)


def _say(event: str) -> None:
    print(json.dumps({"event": event, "at": time.monotonic()}), flush=True)


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[2])})
    asyncio.run(serve(Path(sys.argv[1])))

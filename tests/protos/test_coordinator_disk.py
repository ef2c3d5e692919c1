"""Waiting for a coordinator that is away: `coordinator_disk.py`."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from dtfm.node.data.shared.storage import write
from dtfm.protos import coordinator_disk, services
from dtfm.protos.control_pb2 import PutReply, PutRequest
from dtfm.protos.coordinator_disk import Line


class Away(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "nobody is there"


async def test_who_is_told_to_stop_waits_no_longer_for_a_coordinator_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, line = Event(), Line()

    def call(_method: str, _request: Any) -> None:
        asked.set()
        raise Away

    monkeypatch.setattr(line, "call", call)
    monkeypatch.setattr(coordinator_disk, "LINE", line)
    monkeypatch.setattr(coordinator_disk, "FIRST_PAUSE_SECONDS", 60.0)
    writing = asyncio.create_task(asyncio.to_thread(write, "coordinator://disk/step-00000001", "x", b"content"))
    await asyncio.to_thread(asked.wait)
    began = time.monotonic()
    line.closing.set()
    with pytest.raises(OSError, match="nobody is there; this node is stopping"):
        await asyncio.wait_for(writing, 30)
    assert time.monotonic() - began < 10


async def test_what_is_under_way_when_the_coordinator_is_reached_again_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session then leads the line to the new connection, and closes the channel."""
    asked, release, times = asyncio.Event(), Event(), list[bytes]()
    loop = asyncio.get_running_loop()

    def put(request: PutRequest, _context: Any) -> PutReply:
        times.append(request.data)
        if len(times) == 1:
            loop.call_soon_threadsafe(asked.set)
            release.wait(30)
        return PutReply()

    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((services.handlers("Disk", SimpleNamespace(Put=put, Look=None, Get=None)),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    line = Line()

    def call(method: str, request: Any) -> Any:
        line._channel = line._channel or grpc.insecure_channel(f"127.0.0.1:{port}")
        return getattr(services.stub("Disk", line._channel), method).future(request, timeout=30)

    monkeypatch.setattr(line, "call", call)
    monkeypatch.setattr(coordinator_disk, "LINE", line)
    monkeypatch.setattr(coordinator_disk, "FIRST_PAUSE_SECONDS", 0.01)
    try:
        writing = asyncio.create_task(asyncio.to_thread(write, "coordinator://disk/step-00000001", "x", b"content"))
        await asyncio.wait_for(asked.wait(), 30)
        line.lead_to(None)  # type: ignore[arg-type]
        await asyncio.wait_for(writing, 30)
        assert times[:3] == [b"", b"", b"content"], "the first message opens the file"
    finally:
        release.set()
        server.stop(None).wait()

"""Waiting for a coordinator that is away: `coordinator_disk.py`."""

from __future__ import annotations

import asyncio
import time
from threading import Event
from typing import Any

import grpc
import pytest

from dtfm.node.data.storage import write
from dtfm.protos import coordinator_disk
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

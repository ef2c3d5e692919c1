"""Strangers at a node's port, and members that ask too much there: `transport/warden.py`, `transport/callers.py`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from dtfm.node.state.state_store import StateStore
from dtfm.node.transport import callers, warden
from dtfm.node.transport.peer_server import PeerServer
from dtfm.protos import connection
from dtfm.protos.connection import open_channel
from dtfm.protos.identity.credentials import to_peer
from dtfm.protos.streams import method
from tests.protos.members import member

HANDSHAKE = 2.0


async def no_wait(seconds: float) -> None:
    pass


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[int]:
    """The port of node a."""
    server = PeerServer(StateStore(), no_wait)
    port = await server.start("127.0.0.1:0")
    server.become(member("a"))
    try:
        yield port
    finally:
        await server.stop()


async def test_silent_connections_are_few_and_end_while_a_members_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_CAREFUL", (("grpc.server_handshake_timeout_ms", int(HANDSHAKE * 1000)),))
    monkeypatch.setattr(warden, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(warden, "CROWDED", 0)
    monkeypatch.setattr(warden, "LEFT", 6)  # the member's is one
    monkeypatch.setattr(warden, "MOST_OF_ONE", 5)
    async with serving() as port, open_channel(f"127.0.0.1:{port}", to_peer(member("b"), "a")) as channel:
        await method(channel, "Ping")(b"before")
        files = len(os.listdir("/dev/fd"))
        many = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in many]
        began, soon = time.monotonic(), 0
        while soon < len(many) - 5:
            assert time.monotonic() - began < HANDSHAKE / 2
            soon = len((await asyncio.wait(ends, timeout=0.05))[0])
        async with asyncio.timeout(HANDSHAKE + 5):
            assert set(await asyncio.gather(*ends)) == {b""}
        for _, writer in many:
            writer.close()
        assert await method(channel, "Ping")(b"after") == b"after"
        assert len(os.listdir("/dev/fd")) <= files + 30


async def test_a_member_that_floods_with_calls_is_answered_later_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callers, "CALLS_PER_SECOND", 1.0)
    monkeypatch.setattr(callers, "CALLS_AT_ONCE", 10.0)
    async with serving() as port, contextlib.AsyncExitStack() as stack:
        *flood, other = [
            await stack.enter_async_context(open_channel(f"127.0.0.1:{port}", to_peer(member(name), "a"), apart=True))
            for name in ("b", "b", "b", "b", "b", "c")
        ]
        calls = [asyncio.ensure_future(method(each, "Ping")(b"")) for each in flood for _ in range(12)]
        async with asyncio.timeout(60):
            assert await method(other, "Ping")(b"x") == b"x"
            refused = 0
            while refused < 30:  # ten are answered, some wait
                done, _ = await asyncio.wait(calls, timeout=0.05)
                refused = sum(call.exception() is not None for call in done)
                answered = len(done) - refused
        problem = next(error for call in done if (error := call.exception()) is not None)
        assert isinstance(problem, grpc.aio.AioRpcError)
        assert problem.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(problem.details()).startswith("BUSY")
        assert answered < 30
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

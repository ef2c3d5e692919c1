"""The nodes' streams, and how one ends without harm to the others: `service/streams.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.service.streams import Streams
from dtfm.protos import control_pb2 as wire
from dtfm.protos import control_pb2_grpc
from dtfm.protos.connection import MAX_MESSAGE_BYTES
from dtfm.protos.credentials import to_coordinator
from tests.coordinator.fake_node import silent
from tests.coordinator.script import hello
from tests.coordinator.serving import run_in, serving


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol_version": 99}, wire.PROTOCOL_VERSION),
        ({"run": "other"}, wire.WRONG_RUN),
        ({"candidates": ["nowhere"]}, wire.MALFORMED),
    ],
)
async def test_refusals_name_their_reason_and_end_the_stream(
    tmp_path: Path, changes: dict[str, Any], reason: wire.RefusalReason
) -> None:
    async with serving(tmp_path) as served, served.node("a", **changes) as node:
        await asyncio.wait_for(node.over.wait(), 10)
        assert node.refusal is not None
        assert node.refusal.reason == reason


async def test_a_stream_that_is_to_end_does_not_wait_for_a_node_that_reads_no_more() -> None:
    inputs: asyncio.Queue[t.Input] = asyncio.Queue()
    streams, told = Streams(inputs, first_message_seconds=10), asyncio.Event()

    async def said() -> AsyncIterator[wire.NodeMessage]:
        yield hello("a")
        await asyncio.Event().wait()

    async def never_read(message: wire.CoordinatorMessage) -> None:
        told.set()
        await asyncio.Event().wait()

    serving = asyncio.create_task(streams.serve(said(), never_read, "a"))
    stream = (await inputs.get()).stream  # type: ignore[union-attr]
    streams.put(stream, wire.CoordinatorMessage())
    await told.wait()
    streams.put(stream, None)
    await asyncio.wait_for(serving, 10)
    assert inputs.get_nowait() == t.StreamClosed(stream, "its connection broke")
    assert not streams.any_open


async def test_two_nodes_cannot_share_an_identity(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.node("a", incarnation=1):
        await served.until(lambda: "a" in served.server.state.members.sessions)
        async with served.node("a", incarnation=2) as second:
            await asyncio.wait_for(second.over.wait(), 10)
            assert second.refusal is not None
            assert second.refusal.reason == wire.IDENTITY_IN_USE
        assert "a" in served.server.state.members.sessions


async def test_a_node_started_again_takes_the_place_of_its_process_that_fell_silent(tmp_path: Path) -> None:
    run = run_in(tmp_path, cluster={"lease": 1.0})
    async with serving(tmp_path, run) as served, served.node("a", incarnation=1, twist=silent) as first:
        await served.until(lambda: "a" in served.ledger.members)
        async with served.node("a", incarnation=2) as second:
            await served.until(lambda: served.ledger.members["a"].incarnation.endswith("2"))
            await asyncio.wait_for(first.over.wait(), 10)
            assert second.refusal is None
        reasons = [event.reason for event in served.events if isinstance(event, ev.NodeLeft)]
        assert reasons[0] == "another process has taken over its identity, and it has been silent since"


async def test_a_silent_stream_is_closed(tmp_path: Path) -> None:
    async with serving(tmp_path, run_in(tmp_path, cluster={"lease": 0.5})) as served, served.channel() as channel:
        stub = control_pb2_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Join(metadata=await served.enrolled("silent"))
        reply = await asyncio.wait_for(call.read(), 10)
        assert reply.refusal.reason == wire.MALFORMED
        assert await asyncio.wait_for(call.read(), 10) is grpc.aio.EOF


async def test_a_message_larger_than_allowed_ends_only_its_stream(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.node("a"):
        await served.until(lambda: "a" in served.server.state.members.sessions)
        credentials, named = to_coordinator(served.server.authority)
        options = (*named, ("grpc.max_send_message_length", -1))
        async with grpc.aio.secure_channel(served.address, credentials, options=options) as channel:
            stub = control_pb2_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Join(metadata=await served.enrolled("b"))
            await call.write(hello("b"))
            assert (await call.read()).WhichOneof("message") == "welcome"
            await call.write(wire.NodeMessage(goodbye=wire.Goodbye(reason="x" * MAX_MESSAGE_BYTES)))
            assert await asyncio.wait_for(call.code(), 10) == grpc.StatusCode.RESOURCE_EXHAUSTED
        await served.until(lambda: "b" not in served.server.state.members.sessions)
        assert "a" in served.server.state.members.sessions

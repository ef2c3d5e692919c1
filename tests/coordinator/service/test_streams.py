"""The nodes' streams, and how one ends without harm to the others: `service/streams.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.service.streams import (
    MOST_INPUT_BYTES,
    MOST_INPUTS,
    MOST_UNREAD,
    MOST_UNREAD_BYTES,
    Inputs,
    Place,
    Streams,
)
from dtfm.protos import control_pb2 as wire, services
from dtfm.protos.connection import MAX_MESSAGE_BYTES
from dtfm.protos.identity.credentials import to_coordinator
from tests.coordinator.script import hello
from tests.coordinator.serving import run_in, serving


async def unheard(message: wire.CoordinatorMessage) -> None:
    """Messages to nodes have no effect."""


async def test_a_refusal_names_its_reason_and_ends_the_stream(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.node("a", protocol_version=99) as node:
        await asyncio.wait_for(node.over.wait(), 10)
        assert node.refusal is not None
        assert node.refusal.reason == wire.PROTOCOL_VERSION


async def test_a_stream_that_is_to_end_does_not_wait_for_a_node_that_reads_no_more() -> None:
    inputs = Inputs()
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
    assert await inputs.get() == t.StreamClosed(stream, "its connection broke")
    assert not streams.any_open


@pytest.mark.parametrize(("size", "unread"), [(0, MOST_UNREAD), (MOST_UNREAD_BYTES // 4, 3)])
async def test_a_node_that_does_not_read_is_hung_up_on_once_too_much_waits_for_it(size: int, unread: int) -> None:
    inputs = Inputs()
    streams, told, reads, heard = Streams(inputs, 10), asyncio.Event(), asyncio.Event(), list[int]()
    message = wire.CoordinatorMessage(welcome=wire.Welcome(authority=bytes(size)))

    async def said() -> AsyncIterator[wire.NodeMessage]:
        yield hello("a")
        await asyncio.Event().wait()

    async def written(message: wire.CoordinatorMessage) -> None:
        heard.append(message.ByteSize())
        told.set()
        await reads.wait()

    serving = asyncio.create_task(streams.serve(said(), written, "a"))
    stream = (await inputs.get()).stream  # type: ignore[union-attr]
    streams.put(stream, message)
    await told.wait()  # this one is being written
    for _ in range(unread):
        streams.put(stream, message)
    outgoing = streams._outgoing[stream]
    assert not outgoing.ended.is_set()
    streams.put(stream, message)
    assert outgoing.ended.is_set()
    assert outgoing._waiting.qsize() == 1  # the waiting messages are gone, except the end
    reads.set()
    await asyncio.wait_for(serving, 10)
    assert len(heard) == 1


async def test_who_says_much_fills_its_own_place_alone() -> None:
    inputs = Inputs()
    streams, read = Streams(inputs, first_message_seconds=10), 0

    async def much() -> AsyncIterator[wire.NodeMessage]:
        nonlocal read
        yield hello("a")
        while True:
            read += 1
            yield heartbeat

    async def little() -> AsyncIterator[wire.NodeMessage]:
        yield hello("b")
        yield heartbeat
        await asyncio.Event().wait()

    heartbeat = wire.NodeMessage(heartbeat=wire.Heartbeat())
    tasks = [asyncio.create_task(streams.serve(said, unheard, "")) for said in (much(), little())]
    heard: list[t.Input] = []
    async with asyncio.timeout(10):
        while sum(isinstance(event, t.Heard) and event.stream == 2 for event in heard) < 1:
            await asyncio.sleep(0)
            assert read <= len(heard) + MOST_INPUTS + 1
            heard.append(await inputs.get())
    for task in tasks:
        task.cancel()
    assert len(heard) < 4 * MOST_INPUTS


async def test_a_large_message_waits_alone() -> None:
    inputs, place = Inputs(), Place()
    large = t.Heard(1, wire.NodeMessage())
    await inputs.put_from(place, large, 10 * MOST_INPUT_BYTES)
    second = asyncio.create_task(inputs.put_from(place, large, 1))
    await asyncio.sleep(0)
    assert not second.done()
    await inputs.get()
    await asyncio.wait_for(second, 10)


async def test_what_all_say_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtfm.coordinator.service.streams.MOST_WAITING_BYTES", 250)
    inputs = Inputs()
    puts = [asyncio.create_task(inputs.put_from(Place(), t.Heard(n, wire.NodeMessage()), 100)) for n in range(5)]
    await asyncio.sleep(0)
    assert [put.done() for put in puts] == [True, True, False, False, False]
    taken = [await asyncio.wait_for(inputs.get(), 10) for _ in range(5)]
    assert {event.stream for event in taken if isinstance(event, t.Heard)} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(("of", "size"), [("MESSAGES", 0), ("BYTES", 100)])
async def test_who_says_more_than_a_node_has_to_say_is_read_more_slowly(
    monkeypatch: pytest.MonkeyPatch, of: str, size: int
) -> None:
    monkeypatch.setattr(f"dtfm.coordinator.service.streams.{of}_AT_ONCE", 5.0 * max(size, 1))
    monkeypatch.setattr(f"dtfm.coordinator.service.streams.{of}_PER_SECOND", 1e-3)
    pauses: list[tuple[int, float]] = []
    said, go_on = 0, asyncio.sleep

    async def pause(seconds: float) -> None:
        pauses.append((said, seconds))
        await go_on(0)

    async def says() -> AsyncIterator[wire.NodeMessage]:
        nonlocal said
        yield hello("a")
        for number in range(1, 21):
            said = number
            yield wire.NodeMessage(goodbye=wire.Goodbye(reason="x" * size))

    monkeypatch.setattr(asyncio, "sleep", pause)
    inputs = Inputs()
    task = asyncio.create_task(Streams(inputs, first_message_seconds=10).serve(says(), unheard, "a"))
    for _ in range(21):
        await asyncio.wait_for(inputs.get(), 10)
    task.cancel()
    assert 4 <= pauses[0][0] <= 6, "messages sent together are read together"
    assert [number for number, _ in pauses] == [*range(pauses[0][0], 21)]
    assert pauses[-1][1] > pauses[0][1] > 0


async def test_a_party_that_fills_the_log_is_not_heard_on_any_of_its_streams_and_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dtfm.coordinator.service.streams.EVENTS_PER_SECOND", 1e-6)
    monkeypatch.setattr("dtfm.coordinator.service.streams.EVENTS_AT_ONCE", 5.0)
    inputs = Inputs()
    streams = Streams(inputs, first_message_seconds=10, party=lambda name: name.partition("-")[0])

    async def says(name: str) -> AsyncIterator[wire.NodeMessage]:
        yield hello(name)
        while True:
            yield wire.NodeMessage(heartbeat=wire.Heartbeat())

    heard: list[int] = []

    async def take(of: int) -> None:
        """Takes this number of inputs. Each input of the party "a" puts an event into the log."""
        async with asyncio.timeout(10):
            for _ in range(of):
                event = await inputs.get()
                assert isinstance(event, t.Greeted | t.Heard)
                heard.append(event.stream)
                streams.logged(event, int(event.stream in at))

    at = {1, 3}
    tasks = [asyncio.create_task(streams.serve(says(name), unheard, name)) for name in ("a", "b")]
    await take(200)
    assert heard.count(1) <= 5 + MOST_INPUTS + 1
    tasks.append(asyncio.create_task(streams.serve(says("a-2"), unheard, "a-2")))
    await take(200)
    assert heard.count(1) + heard.count(3) <= 5 + MOST_INPUTS + 1
    for task in tasks:
        task.cancel()


async def test_a_silent_stream_is_closed(tmp_path: Path) -> None:
    async with serving(tmp_path, run_in(tmp_path, cluster={"lease": 0.5})) as served, served.channel() as channel:
        stub = services.stub("Coordinator", channel)
        call = stub.Join(metadata=await served.enrolled("silent"))
        reply = await asyncio.wait_for(call.read(), 10)
        assert reply.refusal.reason == wire.MALFORMED
        assert await asyncio.wait_for(call.read(), 10) is grpc.aio.EOF


async def read_on(call: grpc.aio.StreamStreamCall[wire.NodeMessage, wire.CoordinatorMessage]) -> None:
    """Reads all answers: gRPC tells how a call ended only when all earlier messages were read."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_message_larger_than_allowed_ends_only_its_stream(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.node("a"):
        await served.until(lambda: "a" in served.server.state.members.sessions)
        credentials, named = to_coordinator(served.server.authority.certificate)
        options = (*named, ("grpc.max_send_message_length", -1))
        async with grpc.aio.secure_channel(served.address, credentials, options=options) as channel:
            stub = services.stub("Coordinator", channel)
            call = stub.Join(metadata=await served.enrolled("b"))
            await call.write(hello("b"))
            assert (await call.read()).WhichOneof("message") == "welcome"
            await call.write(wire.NodeMessage(goodbye=wire.Goodbye(reason="x" * MAX_MESSAGE_BYTES)))
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await asyncio.wait_for(read_on(call), 10)
            assert ended.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await served.until(lambda: "b" not in served.server.state.members.sessions)
        assert "a" in served.server.state.members.sessions

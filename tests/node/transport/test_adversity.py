"""What a peer may do wrong, at random: cut, stretched, swapped, repeated and lost frames, noise to every method, and not
reading. Each is refused by name, and the streams beside it go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
import torch
from hypothesis import given, settings, strategies as st

from dtfm.node.network.bandwidth_probe import MOST_BYTES, receive_probe
from dtfm.node.transport.frame_validation import Expectations
from dtfm.node.transport.receiver import Arrival, Receiver
from dtfm.node.transport.sender import Sender
from dtfm.protos.connection import server_options
from dtfm.protos.frame import CHUNK_BYTES, Assembly, FrameError, FrameProblem, Header, Kind, frames, parse
from dtfm.protos.identity.credentials import peer_credentials
from dtfm.protos.peer_pb2 import StateRequest
from dtfm.protos.streams import SERVICE, method
from tests.node.dialling import dialler
from tests.node.sending import activation, send
from tests.node.transport.test_peer_server import ELEMENTS, GENERATION, STEP, Node, channel_to, named, tensor_frames
from tests.protos.members import member

Result = TypeVar("Result")
Damage = Callable[[random.Random, list[bytes]], None]
PATIENCE_SECONDS = 30.0
ANSWERS = (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
seeds = st.integers(0, 2**32)


def cut(chance: random.Random, sent: list[bytes]) -> None:
    at = chance.randrange(len(sent))
    sent[at] = sent[at][: chance.randrange(len(sent[at]))]


def stretch(chance: random.Random, sent: list[bytes]) -> None:
    sent[chance.randrange(len(sent))] += chance.randbytes(chance.randint(1, 100))


def swap(chance: random.Random, sent: list[bytes]) -> None:
    a, b = chance.sample(range(len(sent)), 2)
    sent[a], sent[b] = sent[b], sent[a]


def repeat(chance: random.Random, sent: list[bytes]) -> None:
    sent.insert(chance.randrange(len(sent)), chance.choice(sent))


def lose(chance: random.Random, sent: list[bytes]) -> None:
    del sent[chance.randrange(len(sent) - 1)]


def noise(chance: random.Random, sent: list[bytes]) -> None:
    sent.insert(chance.randrange(len(sent)), chance.randbytes(chance.randrange(300)))


DAMAGES: tuple[Damage, ...] = (cut, stretch, swap, repeat, lose, noise)
each_damage = pytest.mark.parametrize("damage", DAMAGES)


@each_damage
@settings(max_examples=settings().max_examples // 4)
@given(seed=seeds)
def test_of_damaged_frames_a_tensor_comes_out_as_it_was_sent_or_not_at_all(damage: Damage, seed: int) -> None:
    chance = random.Random(seed)
    payload = chance.randbytes(1000) * (2 * CHUNK_BYTES // 1000)
    header = Header(Kind.STATE, 0, 1, 3, 7, 2, 0, len(payload) // 4, len(payload))
    sent = list(frames(header, memoryview(payload)))
    whole = list(sent)
    damage(chance, sent)
    assembly = Assembly(header, memoryview(bytearray(len(payload))))
    done, refused = False, False
    for frame in sent:
        try:
            done = assembly.take(*parse(frame)) or done
        except FrameError:
            refused = True
    if done:
        assert bytes(assembly.encoded) == payload
    assert refused or sent == whole or not done


class Recording(Receiver):
    """Remembers what it refused."""

    def __init__(self, expect: Expectations, applied: int, deliver: Callable[[Arrival], None]) -> None:
        super().__init__(expect, applied, deliver)
        self.refused: list[FrameProblem] = []

    def take(self, source: str, frame: bytes) -> Kind:
        try:
            return super().take(source, frame)
        except FrameError as refusal:
            self.refused.append(refusal.problem)
            raise


class Running:
    """A node that serves on an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.node = self.run(self._start())

    async def _start(self) -> Node:
        node = Node()
        node.address = f"127.0.0.1:{await node.server.start('127.0.0.1:0')}"
        node.server.deliver_to(node.receiver)
        return node

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_SECONDS)

    def close(self) -> None:
        self.run(self.node.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    started = Running()
    yield started
    started.close()


async def how_it_ended(call: Any) -> grpc.StatusCode:
    """Reads all answers of ``call``."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    code: grpc.StatusCode = await call.code()
    return code


async def send_all(call: Any, sent: list[bytes]) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
        for frame in sent:  # the call may end before all is written
            await call.write(frame)
        await call.done_writing()


@each_damage
@settings(max_examples=settings().max_examples // 8)
@given(seed=seeds)
def test_a_damaged_stream_is_refused_by_name_and_the_one_beside_it_goes_on(
    running: Running, damage: Damage, seed: int
) -> None:
    async def scene() -> None:
        node = running.node
        receiver = Recording(node.receiver._expect, STEP - 1, node.arrived.put_nowait)
        node.server.deliver_to(receiver)
        sent = tensor_frames(index=0) + tensor_frames(index=2)
        whole = list(sent)
        damage(random.Random(seed), sent)
        async with channel_to(node, "a") as bad, channel_to(node, "b") as good:
            beside = method(good, "Tensors")(metadata=named("b"))
            first, second = tensor_frames(index=1)
            await beside.write(first)
            call = method(bad, "Tensors")(metadata=named("a"))
            await send_all(call, sent)
            refusal: bytes = await call
            # Two tensors may come in either order, and a lost one may still come: all else is refused.
            if not refusal:
                assert set(sent) <= set(whole)
                assert len(sent) <= len(whole)
                assert receiver.refused == []
            else:
                (problem,) = receiver.refused
                assert refusal.decode().startswith(f"{problem.name}: ")
            await beside.write(second)
            await beside.done_writing()
            assert await beside == b""
        arrived = [node.arrived.get_nowait() for _ in range(node.arrived.qsize())]
        assert [a.header.index for a in arrived if a.source == "b"] == [1]
        assert not any(any(a.encoded[:: CHUNK_BYTES // 7]) for a in arrived)  # all were sent as zeros

    running.run(scene())


@given(request=st.binary(max_size=60))
def test_whatever_is_asked_is_answered_or_refused_by_name(running: Running, request: bytes) -> None:
    async def scene() -> None:
        async with channel_to(running.node) as channel:
            assert await method(channel, "Ping")(request) == request

            async def chunks(count: int) -> AsyncIterator[bytes]:
                for _ in range(count):
                    yield request

            if request:
                answers = [answer async for answer in method(channel, "Upload")(chunks(2))]
                assert answers == [str(len(request)).encode()] * 2
            else:  # one: a second that is being written when the refusal comes is an INTERNAL error of grpc's own
                assert await how_it_ended(method(channel, "Upload")(chunks(1))) in ANSWERS
            for call in (method(channel, "Download")(chunks(1)), method(channel, "State")(request)):
                assert await how_it_ended(call) in ANSWERS

    running.run(scene())


@given(
    generation=st.integers(0, 2**64 - 1),
    step=st.sampled_from([STEP, 0, 2**32 - 1]),
    bucket=st.sampled_from([3, 0, 2**32 - 1]),
    offset=st.sampled_from([0, 1, 10**6, 4_200_000, 2**63, 2**64 - 1]),
)
def test_state_is_asked_for_with_any_numbers(
    running: Running, generation: int, step: int, bucket: int, offset: int
) -> None:
    async def scene() -> None:
        wanted = StateRequest(generation=generation, step=step, bucket=bucket, offset=offset).SerializeToString()
        async with channel_to(running.node) as channel:
            assert await how_it_ended(method(channel, "State")(wanted)) in ANSWERS

    running.run(scene())


def test_who_asks_and_does_not_answer_keeps_nobody_waiting(running: Running) -> None:
    async def silence() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def scene() -> None:
        async with channel_to(running.node) as idle, channel_to(running.node) as busy:
            unread = [method(idle, "Download")(silence()) for _ in range(4)]
            for call in unread:
                await call.read()
            assert sum([size async for size in receive_probe(method(busy, "Download"))]) == MOST_BYTES
            for channel in (idle, busy):
                assert await method(channel, "Ping")(b"still there?") == b"still there?"
            for call in unread:
                call.cancel()

    running.run(scene())


async def test_a_peer_that_stops_reading_holds_back_who_sends_to_it_and_nobody_else() -> None:
    stop, stuck = asyncio.Event(), asyncio.Event()

    async def never_reads(requests: AsyncIterator[bytes], context: Any) -> bytes:
        stuck.set()
        await stop.wait()
        return b""

    itself = member("deaf")
    deaf = grpc.aio.server(options=server_options())
    handlers: dict[str, Any] = {"Tensors": grpc.stream_unary_rpc_method_handler(never_reads)}
    deaf.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = deaf.add_secure_port("127.0.0.1:0", peer_credentials(lambda: itself))
    await deaf.start()
    node = Node()
    node.address = f"127.0.0.1:{await node.server.start('127.0.0.1:0')}"
    node.server.deliver_to(node.receiver)
    sender = Sender("a", lambda generation, error: None)
    await sender.connect(GENERATION, dialler("a"), {"deaf": f"127.0.0.1:{port}", "me": node.address}, 20, 10)
    sent = 0
    large = torch.zeros(4 << 20)  # 16 MiB

    def pour() -> None:
        nonlocal sent
        while True:
            send(sender, "deaf", activation(GENERATION, STEP, sent), large)
            sent += 1

    pouring = asyncio.ensure_future(asyncio.to_thread(pour))
    await asyncio.wait_for(stuck.wait(), PATIENCE_SECONDS)
    send(sender, "me", activation(GENERATION, STEP, 0), torch.zeros(ELEMENTS))
    assert (await asyncio.wait_for(node.arrived.get(), PATIENCE_SECONDS)).header.index == 0
    sender.interrupt("the step is over")
    with pytest.raises(Exception, match="the step is over"):
        await asyncio.wait_for(pouring, PATIENCE_SECONDS)
    assert sent <= 6  # 32 MiB wait in the lane, 16 MiB are on their way, and one tensor is in between
    stop.set()
    await sender.close()
    await asyncio.gather(node.server.stop(), deaf.stop(None))

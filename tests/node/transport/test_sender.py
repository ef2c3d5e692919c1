"""On a slow line, the pipeline's tensors overtake what replicas exchange."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch

from dtfm.kernels.codec import Codec, encode
from dtfm.node.model.placement import Group, placement_of
from dtfm.node.state.state_store import StateStore
from dtfm.node.training.failure import problem_of
from dtfm.node.transport import sender as sender_module
from dtfm.node.transport.frame_validation import Expectations, TensorSizes
from dtfm.node.transport.peer_server import PeerServer
from dtfm.node.transport.receiver import Arrival, Receiver
from dtfm.node.transport.send_priority import Rank
from dtfm.node.transport.sender import QUEUE_BYTES, Sender, What, ready
from dtfm.protos.control_pb2 import StepProblem
from dtfm.protos.frame import CHUNK_BYTES, Kind, frames
from dtfm.scheduler.model.plan import Stage, from_routes
from tests.node.dialling import dialler
from tests.node.sending import activation, send
from tests.node.transport.test_peer_server import at_once
from tests.protos.members import member

GENERATION, STEP = 2, 1
PIECE = CHUNK_BYTES // 4  # elements of one piece of gradients: a frame of fp32
PIECES, ACTIVATION_FRAMES = 31, 16
PATIENCE_SECONDS = 30.0
PLAN = from_routes(GENERATION, [Stage((0, 1), ("a",), ()), Stage((1, 2), ("z",), ())], [("az", 1)])


class Line:
    """A slow line."""

    RATE, PIECE = 40e6, 1 << 16

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def to(self, port: int) -> int:
        """The port of this line's near end, which leads to ``port``, both on loopback."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        self._start(self._accept(listener, port))
        mine: int = listener.getsockname()[1]
        return mine

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    async def _accept(self, listener: socket.socket, port: int) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                near, _ = await loop.sock_accept(listener)
                far = socket.create_connection(("127.0.0.1", port))
                far.setblocking(False)
                self._start(self._carry(near, far, slowly=True))
                self._start(self._carry(far, near, slowly=False))

    async def _carry(self, source: socket.socket, destination: socket.socket, *, slowly: bool) -> None:
        loop = asyncio.get_running_loop()
        with source, contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, self.PIECE):
                if slowly:
                    await asyncio.sleep(len(data) / self.RATE)
                await loop.sock_sendall(destination, data)


class End:
    """A node that ``a`` sends activations to, and, since both hold some parameters, pieces of their gradients."""

    def __init__(self, name: str) -> None:
        self.pieces = 0
        self.some, self.all, self.activation = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.server = PeerServer(StateStore(), at_once)
        self.server.become(member(name))
        placement = placement_of(PLAN, name, 0)
        assert placement is not None
        groups = {index: Group(("a", name), ("a",), (0, 1), (1, 1), (0, 0)) for index in range(PIECES)}
        sizes = TensorSizes(
            ACTIVATION_FRAMES * PIECE, 0, dict.fromkeys(groups, 2 * PIECE), torch.float32, torch.float32
        )
        expect = Expectations(replace(placement, groups=groups), sizes)
        self.server.deliver_to(Receiver(expect, STEP - 1, self._take))

    def _take(self, arrival: Arrival) -> None:
        if arrival.header.kind is Kind.ACTIVATION:
            self.activation.set()
            return
        self.pieces += 1
        if self.pieces == 4:
            self.some.set()
        if self.pieces == PIECES:
            self.all.set()


async def test_an_activation_overtakes_what_waits_for_the_same_peer() -> None:
    line, end = Line(), End("z")
    address = f"127.0.0.1:{await line.to(await end.server.start('127.0.0.1:0'))}"
    sender = Sender("a", lambda generation, error: None)
    await sender.connect(GENERATION, dialler("a"), {"z": address}, PATIENCE_SECONDS, PATIENCE_SECONDS)
    queue = sender._lanes["z", Rank.REDUCTION].queue
    piece = encode(Codec.OFF, torch.zeros(PIECE))
    for index in range(PIECES):
        sender.send("z", What(Kind.REDUCE, GENERATION, STEP, index, 1, PIECE, torch.float32), ready(piece))
    await asyncio.wait_for(end.some.wait(), PATIENCE_SECONDS)
    before = queue.qsize()
    send(sender, "z", activation(GENERATION, STEP, 0), torch.zeros(ACTIVATION_FRAMES * PIECE))
    await asyncio.wait_for(end.activation.wait(), PATIENCE_SECONDS)
    overtaken = queue.qsize()
    await asyncio.wait_for(end.all.wait(), PATIENCE_SECONDS)
    await sender.close()
    await end.server.stop()
    await line.close()
    # Taking turns, as many pieces as frames would be sent, and some more. A fifth of the line is theirs, by a clock that goes on
    # while this machine does something else, and some pieces are in the socket.
    assert before > ACTIVATION_FRAMES
    assert before - overtaken <= ACTIVATION_FRAMES * 3 // 4


async def test_a_tensor_that_cannot_be_encoded_is_this_nodes_failure_and_not_the_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def encode(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    end, failed = End("z"), asyncio.Queue[tuple[int, Exception]]()
    monkeypatch.setattr(sender_module, "encode", encode)
    sender = Sender("a", lambda *why: failed.put_nowait(why))
    address = f"127.0.0.1:{await end.server.start('127.0.0.1:0')}"
    await sender.connect(GENERATION, dialler("a"), {"z": address}, PATIENCE_SECONDS, PATIENCE_SECONDS)
    large = torch.zeros(QUEUE_BYTES // 4)
    for index in range(2):  # the room of the first is free again
        await asyncio.to_thread(send, sender, "z", activation(GENERATION, STEP, index), large)
        generation, error = await asyncio.wait_for(failed.get(), PATIENCE_SECONDS)
        assert (generation, problem_of(error)) == (GENERATION, StepProblem.OUT_OF_MEMORY)
    await sender.close()
    await end.server.stop()
    assert failed.empty()


async def test_a_stream_whose_sending_fails_here_is_lost_and_another_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the trace of it is written to a full disk."""
    end, failed, full = End("z"), asyncio.Queue[tuple[int, Exception]](), OSError(28, "No space left on device")

    def frames_once_there_is_room(*of: Any) -> Any:
        monkeypatch.setattr(sender_module, "frames", frames)
        raise full

    monkeypatch.setattr(sender_module, "frames", frames_once_there_is_room)
    sender = Sender("a", lambda *why: failed.put_nowait(why))
    address = f"127.0.0.1:{await end.server.start('127.0.0.1:0')}"
    await sender.connect(GENERATION, dialler("a"), {"z": address}, PATIENCE_SECONDS, PATIENCE_SECONDS)
    send(sender, "z", activation(GENERATION, STEP, 0), torch.zeros(ACTIVATION_FRAMES * PIECE))
    generation, error = await asyncio.wait_for(failed.get(), PATIENCE_SECONDS)
    assert generation == GENERATION
    assert "No space left on device" in str(error)
    send(sender, "z", activation(GENERATION, STEP, 0), torch.zeros(ACTIVATION_FRAMES * PIECE))
    await asyncio.wait_for(end.activation.wait(), PATIENCE_SECONDS)
    await sender.close()
    await end.server.stop()
    assert failed.empty()

"""On a slow line, what the pipeline waits for overtakes what replicas exchange; and connections are warm when they are needed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest
import torch

from dtfm.kernels.codec import Codec, encode
from dtfm.node.state.state_store import Holding
from dtfm.node.model.placement import Group, share_of
from dtfm.node.transport.frame_validation import Expectations
from dtfm.node.transport.peer_server import PeerServer
from dtfm.node.transport.receiver import Arrival, Inbox
from dtfm.node.transport.send_priority import Rank
from dtfm.node.transport.sender import MOST_WARMING, WARMING, Outbox, What
from dtfm.protos.connection import server_options
from dtfm.protos.credentials import peer_credentials
from dtfm.protos.frame import CHUNK_BYTES, Kind
from dtfm.protos.plan_pb2 import Plan
from dtfm.protos.streams import SERVICE
from tests.node.transport.test_peer_server import at_once
from tests.protos.members import member

GENERATION, STEP = 2, 1
SHARE = CHUNK_BYTES // 4  # elements of one replica's share: a frame of fp32
SHARES, ACTIVATION_FRAMES = 31, 16
PATIENCE_SECONDS = 30.0
PLAN = Plan(
    generation=GENERATION,
    stages=[
        Plan.Stage(first_layer=0, past_last_layer=1, replicas=["a"]),
        Plan.Stage(first_layer=1, past_last_layer=2, replicas=["z"]),
    ],
    routes=[Plan.Route(nodes=["a", "z"], micro_batches=1)],
)


class Line:
    """Carries what is sent over it slowly."""

    RATE, PIECE = 40e6, 1 << 16

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def to(self, port: int) -> int:
        """The port of this end of a way over this line to ``port``, both on loopback."""
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
    """A node that ``a`` sends activations to, and, as they hold some parameters both, shares of their gradients."""

    def __init__(self, name: str) -> None:
        self.shares = 0
        self.some, self.all, self.activation = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.server = PeerServer(Holding(), at_once)
        self.server.become(member(name))
        share = share_of(PLAN, name, 0)
        assert share is not None
        groups = {index: Group(("a", name), ("a",)) for index in range(SHARES)}
        sizes = dict.fromkeys(groups, 2 * SHARE)
        expect = Expectations(share, groups, sizes, ACTIVATION_FRAMES * SHARE, 0, torch.float32, torch.float32)
        self.server.admit_to(Inbox(expect, STEP - 1, self._take))

    def _take(self, arrival: Arrival) -> None:
        if arrival.header.kind is Kind.ACTIVATION:
            self.activation.set()
            return
        self.shares += 1
        if self.shares == 4:
            self.some.set()
        if self.shares == SHARES:
            self.all.set()


async def test_an_activation_overtakes_what_waits_for_the_same_peer() -> None:
    line, end = Line(), End("z")
    address = f"127.0.0.1:{await line.to(await end.server.start('127.0.0.1:0'))}"
    outbox = Outbox("a", lambda peer, generation, why: None)
    await outbox.connect(GENERATION, member("a"), {"z": address}, PATIENCE_SECONDS, PATIENCE_SECONDS)
    queue = outbox._lanes["z", Rank.REDUCTION].queue
    share = encode(Codec.OFF, torch.zeros(SHARE))
    for index in range(SHARES):
        outbox.send_encoded("z", What(Kind.REDUCE, GENERATION, STEP, index, 1), share, SHARE, torch.float32)
    await asyncio.wait_for(end.some.wait(), PATIENCE_SECONDS)
    before = queue.qsize()
    activation = torch.zeros(ACTIVATION_FRAMES * SHARE)
    outbox.send("z", What(Kind.ACTIVATION, GENERATION, STEP, 0), activation, Codec.OFF)
    await asyncio.wait_for(end.activation.wait(), PATIENCE_SECONDS)
    overtaken = queue.qsize()
    await asyncio.wait_for(end.all.wait(), PATIENCE_SECONDS)
    await outbox.close()
    await end.server.stop()
    await line.close()
    # In turns with the activation's frames as many shares would go; a fifth of the line is theirs, and some are in the socket.
    assert before > ACTIVATION_FRAMES
    assert before - overtaken <= ACTIVATION_FRAMES // 2


class Oven:
    """Hears what connections are warmed up with."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[int] = asyncio.Queue()
        itself = member("z")
        self.server = grpc.aio.server(options=server_options())
        handlers: dict[str, Any] = {"Upload": grpc.stream_stream_rpc_method_handler(self._upload)}
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.port = self.server.add_secure_port("127.0.0.1:0", peer_credentials(lambda: itself))

    async def _upload(self, requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        heard = 0
        async for piece in requests:
            heard += len(piece)
            yield str(len(piece)).encode()
        self.heard.put_nowait(heard)


@pytest.mark.parametrize(
    ("holds", "size"),
    [({"z": 2e6}, WARMING * 2e6), ({"z": 1e5}, WARMING * 1e5), ({"z": 1e12}, MOST_WARMING), ({"z": 1e4}, 0), ({}, 0)],
)
async def test_a_new_connection_is_warmed_up_by_what_its_link_holds(holds: dict[str, float], size: float) -> None:
    oven, outbox = Oven(), Outbox("a", lambda peer, generation, why: None)
    await oven.server.start()
    for generation in (1, 2):  # the second finds it connected
        peers = {"z": f"127.0.0.1:{oven.port}"}
        await outbox.connect(generation, member("a"), peers, PATIENCE_SECONDS, PATIENCE_SECONDS, holds)
    if size:
        heard = await asyncio.wait_for(oven.heard.get(), PATIENCE_SECONDS)
        assert heard == int(size)
    await outbox.close()
    await oven.server.stop(None)
    assert oven.heard.empty()

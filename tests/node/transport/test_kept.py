"""The tensors that a node hands out for audits, over real connections, and the receivers."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import grpc
import grpc.aio
import pytest
import torch

from dtfm.kernels.codec import Codec, Encoded
from dtfm.node.state.state_store import StateStore
from dtfm.node.transport.commitments import Commitments, commitment
from dtfm.node.transport.kept import Kept, Offer, Tensor, Wanted, Withheld, Witnesses
from dtfm.node.transport.peer_server import MOST_KEPT_CALLS, PeerServer
from dtfm.node.transport.receiver import Arrival
from dtfm.node.transport.sender import What, ready
from dtfm.protos.connection import open_channel
from dtfm.protos.control_pb2 import Peer
from dtfm.protos.frame import Header, Kind
from dtfm.protos.identity.credentials import to_peer
from dtfm.protos.peer_pb2 import KeptRequest
from dtfm.protos.streams import method
from tests.node.dialling import dialler
from tests.protos.members import member

GENERATION, STEP, ELEMENTS = 2, 4, 300_000  # two frames of fp32
DATA = torch.arange(ELEMENTS, dtype=torch.float32).view(torch.uint8).numpy().data
HEADER = Header(Kind.ACTIVATION, Codec.OFF, 1, GENERATION, STEP, 7, 0, ELEMENTS, len(DATA))
REQUEST = KeptRequest(generation=GENERATION, step=STEP, kind=Kind.ACTIVATION, index=7)
WANTED = Wanted("me", Kind.ACTIVATION, 7, 0, commitment(Codec.OFF, DATA), ELEMENTS, torch.float32)
PATIENCE = 5.0


class Node:
    """Hands out one tensor, or what ``find`` returns."""

    def __init__(self) -> None:
        self.kept = Kept()
        self.server = PeerServer(StateStore(), lambda seconds: asyncio.sleep(0), kept=self.kept)
        self.server.become(member("me"))
        self.find: Callable[[KeptRequest], Tensor] = self._one
        self.peer = Peer(node="me")

    def _one(self, request: KeptRequest) -> Tensor:
        if request.index != HEADER.index:
            raise LookupError(f"NOT_KEPT: {request.index}")
        return HEADER, DATA

    def offer(self) -> None:
        around = frozenset({"a", "me"})
        self.kept.offer = Offer(GENERATION, STEP, around, lambda request: self.find(request))

    @contextlib.asynccontextmanager
    async def witnesses(
        self, patience: float = PATIENCE, by: str = "a", in_all: float = math.inf
    ) -> AsyncIterator[Witnesses]:
        asking = Witnesses(GENERATION, STEP, {"me": self.peer}, dialler(by), patience, in_all)
        yield asking
        await asking.close()


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    node.peer = Peer(node="me", candidates=[f"127.0.0.1:{await node.server.start('127.0.0.1:0')}"])
    yield node
    await node.server.stop()


async def refusal(node: Node, request: bytes, by: str = "a") -> str:
    async with open_channel(node.peer.candidates[0], to_peer(member(by), "me")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await method(channel, "Kept")(request).read()
        return f"{refused.value.code().name}: {refused.value.details()}"


async def test_who_is_around_gets_what_was_sent_between_vote_and_commit_alone(node: Node) -> None:
    assert "NOTHING_KEPT" in await refusal(node, REQUEST.SerializeToString())
    node.offer()
    async with node.witnesses() as witnesses:
        assert await witnesses.fetch([WANTED, WANTED]) == [(HEADER, DATA)] * 2
    node.kept.offer = None
    assert "NOTHING_KEPT" in await refusal(node, REQUEST.SerializeToString())


@pytest.mark.parametrize(
    ("request_", "by", "name"),
    [
        (REQUEST, "stranger", "NOT_AROUND"),
        (KeptRequest(generation=GENERATION, step=STEP - 1, kind=1, index=7), "a", "OTHER_STEP"),
        (KeptRequest(generation=GENERATION + 1, step=STEP, kind=1, index=7), "a", "OTHER_STEP"),
        (KeptRequest(generation=GENERATION, step=STEP, kind=1, index=8), "a", "NOT_KEPT"),
    ],
)
async def test_what_is_not_due_is_refused_by_name(node: Node, request_: KeptRequest, by: str, name: str) -> None:
    node.offer()
    assert f"FAILED_PRECONDITION: {name}" in await refusal(node, request_.SerializeToString(), by)


async def test_what_is_no_request_is_refused(node: Node) -> None:
    node.offer()
    assert "MALFORMED" in await refusal(node, b"\xff\xff")


async def test_a_peer_has_few_such_calls_at_a_time(node: Node) -> None:
    node.offer()
    large = memoryview(bytearray(64 << 20))
    node.find = lambda _: (replace(HEADER, elements=len(large) // 4, total=len(large)), large)
    async with open_channel(node.peer.candidates[0], to_peer(member("a"), "me")) as channel:
        calls = [method(channel, "Kept")(REQUEST.SerializeToString()) for _ in range(MOST_KEPT_CALLS)]
        for call in calls:
            await call.read()
        assert "BUSY" in await refusal(node, REQUEST.SerializeToString())
        for call in calls:
            call.cancel()


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (replace(HEADER, index=8), DATA),
        (replace(HEADER, step=STEP + 1), DATA),
        (replace(HEADER, kind=Kind.GRADIENT), DATA),
        (replace(HEADER, dtype=3), DATA),
        (replace(HEADER, codec=99), DATA),
        (replace(HEADER, total=len(DATA) - 4), DATA[:-4]),
        (replace(HEADER, elements=ELEMENTS - 1, total=len(DATA) - 4), DATA[:-4]),
        (HEADER, memoryview(bytes(len(DATA)))),
    ],
)
async def test_who_hands_out_something_else_has_withheld_it(node: Node, header: Header, data: memoryview) -> None:
    node.offer()
    node.find = lambda _: (header, data)
    async with node.witnesses() as witnesses:
        with pytest.raises(Withheld) as withheld:
            await witnesses.fetch([WANTED])
    assert withheld.value.node == "me"
    assert not withheld.value.unreachable


async def test_a_refusal_is_told_from_a_node_that_cannot_be_reached(node: Node) -> None:
    async with node.witnesses() as witnesses:
        with pytest.raises(Withheld, match="NOTHING_KEPT") as refused:
            await witnesses.fetch([WANTED])
    await node.server.stop()
    async with node.witnesses() as witnesses:
        with pytest.raises(Withheld) as gone:
            await witnesses.fetch([WANTED])
    assert (refused.value.unreachable, gone.value.unreachable) == (False, True)


async def test_a_node_may_keep_an_auditor_waiting_for_so_long_in_all(node: Node) -> None:
    """Though each of its frames comes in time."""
    node.offer()
    async with node.witnesses(in_all=0.5) as witnesses:
        await witnesses.fetch([WANTED])
        witnesses._waited["me"] = 0.6
        with pytest.raises(Withheld, match="in all") as withheld:
            await witnesses.fetch([WANTED])
    assert withheld.value.unreachable


async def test_what_a_node_keeps_an_auditor_waiting_adds_up(node: Node) -> None:
    node.offer()
    waits: list[float] = []
    async with node.witnesses() as witnesses:
        for _ in range(3):
            await witnesses.fetch([WANTED])
            waits.append(witnesses._waited["me"])
    assert 0 < waits[0] < waits[1] < waits[2]


async def test_who_says_nothing_has_withheld_it_after_the_patience_for_a_frame(node: Node) -> None:
    node.offer()
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def find(_: KeptRequest) -> Tensor:
        asyncio.run_coroutine_threadsafe(over.wait(), loop).result()
        return HEADER, DATA

    node.find = find
    async with node.witnesses(patience=0.1) as witnesses:
        with pytest.raises(Withheld, match="sent nothing"):
            await witnesses.fetch([WANTED])
    over.set()


async def test_who_is_not_around_is_not_asked(node: Node) -> None:
    async with node.witnesses() as witnesses:
        with pytest.raises(ConnectionError, match="b is of no stage"):
            await witnesses.fetch([replace(WANTED, node="b")])


def test_a_node_commits_to_what_it_sends_and_gets_tensor_by_tensor() -> None:
    commitments, encoded = Commitments(), Encoded(Codec.OFF, memoryview(bytearray(b"sum")))
    what = What(Kind.GATHER, GENERATION, STEP, 3, 1, 3, torch.float32)
    for peer in ("b", "a"):
        commitments.sends(peer, what, ready(encoded))
    commitments.sends("a", replace(what, part=0), ready(Encoded(Codec.RAW16, encoded.data)))
    commitments.came(Arrival("b", replace(HEADER, kind=Kind.GRADIENT), DATA))
    encoded.data[:] = b"new"  # once it is noted, its memory may change
    sent, received = commitments.report()
    of, other = commitment(Codec.OFF, memoryview(b"sum")), commitment(Codec.RAW16, memoryview(b"sum"))
    assert [(p.peer, p.kind, list(p.indices), list(p.parts), p.digests) for p in sent] == [
        ("a", Kind.GATHER, [3, 3], [0, 1], other + of),
        ("b", Kind.GATHER, [3], [1], of),
    ]
    assert [(p.peer, p.kind, list(p.indices), p.digests) for p in received] == [
        ("b", Kind.GRADIENT, [7], commitment(Codec.OFF, DATA))
    ]

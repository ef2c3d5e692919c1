"""A node follows what the coordinator says about who reaches whom; all on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import grpc.aio
import pytest
import torch

from dtfm.node.network.links import measure_links, reach
from dtfm.node.state.state_store import StateStore
from dtfm.node.training.failure import peer_of
from dtfm.node.transport.lent_connections import Holder
from dtfm.node.transport.peer_server import PeerServer
from dtfm.node.transport.sender import Sender
from dtfm.node.transport.ways import Ways
from dtfm.protos.control_pb2 import Peer, Ways as WaysMessage
from dtfm.protos.identity.credentials import make_authority, make_key
from dtfm.protos.streams import method
from tests.node.sending import activation, send
from tests.protos.members import DAY, NOW, member

LEASE = 4.0


class Node:
    def __init__(self, name: str, relay: bool = False) -> None:
        self.name = name
        holder = Holder(relay)
        self.server = PeerServer(StateStore(), lambda seconds: asyncio.sleep(0), holder=holder)
        self.ways = Ways(name, holder, loopback=True)
        self.dialler = self.ways.dialler

    async def start(self) -> None:
        identity = member(self.name)
        self.server.become(identity)
        self.port = await self.server.start("127.0.0.1:0")
        self.ways.start(f"127.0.0.1:{self.port}")
        self.ways.become(identity, LEASE)

    async def stop(self) -> None:
        await self.ways.stop()
        await self.server.stop()

    @property
    def peer(self) -> Peer:
        return Peer(node=self.name, candidates=[f"127.0.0.1:{self.port}"])

    @property
    def hidden(self) -> Peer:
        """As one knows it who cannot dial it."""
        return Peer(node=self.name)

    def told(
        self, *, dial_back: str = "", relayed: tuple[str, Node] | None = None, lends_to: Node | None = None
    ) -> None:
        """The coordinator tells this node a way to one other node, and the holders of its connections."""
        ways = [WaysMessage.Way(node=dial_back)] if dial_back else []
        ways += [WaysMessage.Way(node=relayed[0], relay=relayed[1].peer)] if relayed else []
        self.ways.follow(WaysMessage(ways=ways, holders=[lends_to.peer] if lends_to else []))

    async def reaches(self, other: Node) -> bool:
        target = self.dialler.target(other.hidden)
        async with self.dialler.open(other.name, target, LEASE, apart=True) as channel:
            try:
                await method(channel, "Ping")(b"", timeout=LEASE / 2, wait_for_ready=True)
            except grpc.aio.AioRpcError:
                return False
            return True


class Deaf:
    """A receiver that takes the first frame and never asks for the next."""

    heard = asyncio.Event()

    def take(self, source: str, frame: bytes) -> None:
        self.heard.set()

    async def readable(self, source: str, taken: object) -> None:
        await asyncio.Event().wait()


Start = Callable[..., Awaitable[Node]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def started(name: str, **options: bool) -> Node:
            node = Node(name, **options)
            await node.start()
            stack.push_async_callback(node.stop)
            return node

        yield started


async def test_a_renewed_identity_is_shown_by_all_later_connections_and_changes_nothing_else(start: Start) -> None:
    a, b = await start("a"), await start("b")
    a.told(dial_back="b")
    a.ways.become(member("a", now=NOW - DAY / 4), LEASE)
    b.told(lends_to=a)
    assert await a.reaches(b)
    # Whom a does not accept: nor, then, what it lends.
    b.told()
    b.ways.become(member("b", make_authority(make_key(), NOW)), LEASE)
    b.told(lends_to=a)
    assert not await a.reaches(b)


async def test_a_node_that_cannot_be_dialled_is_reached_when_it_lends(start: Start) -> None:
    a, b = await start("a"), await start("b")
    assert not await a.reaches(b)
    a.told(dial_back="b")
    b.told(lends_to=a)
    assert await a.reaches(b)


async def test_two_that_cannot_dial_each_other_reach_each_other_over_a_relay(start: Start) -> None:
    a, b, relay = await start("a"), await start("b"), await start("relay", relay=True)
    a.told(relayed=("b", relay), lends_to=relay)
    b.told(relayed=("a", relay), lends_to=relay)
    assert await a.reaches(b)
    assert await b.reaches(a)


async def test_a_channel_goes_on_over_another_relay_when_its_own_is_gone(start: Start) -> None:
    a, b, first = await start("a"), await start("b"), await start("first", relay=True)
    second = await start("second", relay=True)
    a.told(relayed=("b", first))
    b.told(lends_to=first)
    async with a.dialler.open("b", a.dialler.target(b.hidden), LEASE) as channel:
        ping = method(channel, "Ping")
        assert await ping(b"1", timeout=LEASE, wait_for_ready=True) == b"1"
        await first.stop()
        a.told(relayed=("b", second))
        b.told(lends_to=second)
        async with asyncio.timeout(3 * LEASE):
            answer = b""
            while answer != b"2":
                with contextlib.suppress(grpc.aio.AioRpcError):  # of the call that met the end of the relay
                    answer = await ping(b"2", timeout=LEASE, wait_for_ready=True)


async def test_what_went_over_a_relay_that_is_replaced_breaks_at_once(start: Start) -> None:
    """It may be a relay that has vanished without a word; here it is still there."""
    a, b, first = await start("a"), await start("b"), await start("first", relay=True)
    second = await start("second", relay=True)
    a.told(relayed=("b", first))
    b.told(lends_to=first)
    broken: asyncio.Queue[Exception] = asyncio.Queue()
    sender = Sender("a", lambda generation, error: broken.put_nowait(error))
    targets = {"b": a.dialler.target(b.hidden)}
    await sender.connect(1, a.dialler, targets, LEASE, 1000 * LEASE)
    b.server.deliver_to(Deaf())  # type: ignore[arg-type]
    send(sender, "b", activation(1, 1, 0), torch.zeros(8))
    await asyncio.wait_for(Deaf.heard.wait(), LEASE)
    a.told(relayed=("b", second))
    b.told(lends_to=second)
    assert peer_of(await asyncio.wait_for(broken.get(), LEASE)) == "b"
    await sender.connect(2, a.dialler, targets, 2 * LEASE, LEASE)
    await sender.close()


async def test_what_is_measured_over_a_relay_is_the_way_that_is_used(start: Start) -> None:
    a, b, relay = await start("a"), await start("b"), await start("relay", relay=True)
    a.told(relayed=("b", relay))
    b.told(lends_to=relay)
    report = await measure_links("a", [b.hidden], a.dialler, LEASE)
    assert [link.problem for link in report.links] == ["", ""]
    assert all(link.bandwidth > 0 for link in report.links)
    assert [link.way for link in report.links] == ["", ""], "the coordinator knows it"


async def test_an_attempt_to_dial_says_by_which_way_or_why_not(start: Start) -> None:
    a, b = await start("a"), await start("b")
    found = await reach([b.peer, Peer(node="b", candidates=[f"127.0.0.1:{a.port}"])], a.dialler, LEASE)
    good, wrong = found.outcomes
    assert (good.way, good.problem) == ("loopback", "")
    assert wrong.way == ""
    assert f"127.0.0.1:{a.port}" in wrong.problem, "another node is there"

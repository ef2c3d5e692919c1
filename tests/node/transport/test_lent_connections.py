"""Lent connections, over real ones on loopback: the nodes that reach each other by them, and the refusals."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import grpc
import grpc.aio
import pytest

from dtfm.node.state.state_store import StateStore
from dtfm.node.transport import lent_connections
from dtfm.node.transport.backlogs import SHORT_SECONDS
from dtfm.node.transport.doors import Doors
from dtfm.node.transport.lent_connections import Holder, Lender, NotLent, borrow
from dtfm.node.transport.peer_server import PeerServer
from dtfm.node.transport.pipes import Pipe
from dtfm.protos.connection import open_channel
from dtfm.protos.identity.credentials import make_authority, make_key, to_peer
from dtfm.protos.streams import NODE_METADATA, method
from tests.protos.members import NOW, member

PATIENCE = 10.0


class End:
    """A node: it serves peers, holds connections lent to it, lends to holders, and reaches others over lent connections
    alone."""

    def __init__(self, name: str, relay: bool = False) -> None:
        self.name = name
        self.identity = member(name)
        self.holder = Holder(relay)
        self.server = PeerServer(StateStore(), lambda seconds: asyncio.sleep(0), holder=self.holder)
        self.server.become(self.identity)
        self.known: dict[str, End] = {}
        self.relay: End | None = None
        self.lender = Lender(name, lambda holder: self.dial(self.known[holder]))
        self.doors = Doors(self.reach)
        self.opened: list[grpc.aio.Channel] = []

    async def start(self) -> None:
        self.port = await self.server.start("127.0.0.1:0")
        self.lender.listens_at(f"127.0.0.1:{self.port}")

    async def stop(self) -> None:
        await self.lender.close()
        for channel in self.opened:
            await channel.close()
        await self.server.stop()
        await self.doors.stop()

    def dial(self, other: End) -> grpc.aio.Channel:
        return open_channel(f"127.0.0.1:{other.port}", to_peer(self.identity, other.name), PATIENCE, apart=True)

    def lend(self, holder: End) -> None:
        self.known[holder.name] = holder
        self.lender.lend_to(self.known)

    async def reach(self, lender: str) -> Pipe:
        if self.relay is None:
            return await self.holder.take(lender, PATIENCE)
        self.opened.append(self.dial(self.relay))
        return borrow(self.opened[-1], self.name, lender)

    def to(self, node: str) -> grpc.aio.Channel:
        """A channel to ``node`` that leads to its door."""
        self.opened.append(open_channel(self.doors.to(node), to_peer(self.identity, node), 2.0, apart=True))
        return self.opened[-1]


@asynccontextmanager
async def started(*ends: End) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for end in ends:
            await end.start()
            stack.push_async_callback(end.stop)
        yield


async def ping(channel: grpc.aio.Channel, said: bytes = b"hello") -> bytes:
    answer: bytes = await method(channel, "Ping")(said, timeout=PATIENCE, wait_for_ready=True)
    return answer


async def test_a_peer_reaches_a_node_over_a_connection_that_it_was_lent() -> None:
    a, b = End("a"), End("b")
    async with started(a, b):
        b.lend(a)
        assert await ping(a.to("b")) == b"hello"


async def test_a_connection_is_used_once_and_the_next_one_comes() -> None:
    a, b = End("a"), End("b")
    async with started(a, b):
        b.lend(a)
        channels = [a.to("b") for _ in range(3 * lent_connections.SPARE)]
        assert await asyncio.gather(*map(ping, channels)) == [b"hello"] * len(channels)


async def test_a_third_node_relays_what_it_cannot_read() -> None:
    a, b, relay = End("a"), End("b"), End("relay", relay=True)
    secret, seen = b"nobody else may read this", bytearray()
    async with started(a, b, relay):
        b.lend(relay)
        a.relay = relay
        take = relay.holder.take

        async def taken(lender: str, patience: float) -> Pipe:
            pipe = await take(lender, patience)

            async def record(data: bytes) -> None:
                seen.extend(data)
                await pipe.write(data)

            return replace(pipe, write=record)

        relay.holder.take = taken  # type: ignore[method-assign]
        to_b = a.to("b")
        for _ in range(100):
            assert await ping(to_b, secret) == secret
    assert len(seen) > 100 * len(secret)
    assert b"nobody else" not in seen
    assert b"dtfm.Peer" not in seen


async def test_the_other_end_of_a_lent_connection_must_be_the_node_that_was_meant() -> None:
    a, b = End("a"), End("b")
    async with started(a, b):
        b.lend(a)

        async def wrong(_: str) -> Pipe:
            return await a.holder.take("b", PATIENCE)

        a.doors._reach = wrong
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await method(a.to("stranger"), "Ping")(b"", timeout=PATIENCE)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_only_members_lend() -> None:
    a, b = End("a"), End("b")
    b.identity = member("b", make_authority(make_key(), NOW))
    async with started(a, b):
        b.lend(a)
        with pytest.raises(NotLent):
            await a.holder.take("b", 0.5)


async def test_nobody_lends_in_anothers_name() -> None:
    a, b = End("a"), End("b")
    async with started(a, b):
        channel = b.dial(a)
        call = method(channel, "Lend")(metadata=((NODE_METADATA, "relay"),))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        await channel.close()


async def test_a_revoked_node_lends_nothing_any_more() -> None:
    a, b = End("a"), End("b")
    async with started(a, b):
        channel = b.dial(a)
        call = method(channel, "Lend")(metadata=((NODE_METADATA, "b"),))
        await a.holder.take("b", PATIENCE)
        a.server.callers.revoke(["b"])
        with pytest.raises(grpc.aio.AioRpcError, match="REVOKED"):
            await asyncio.wait_for(call.read(), PATIENCE)
        with pytest.raises(grpc.aio.AioRpcError, match="REVOKED"):
            await method(channel, "Lend")(metadata=((NODE_METADATA, "b"),)).read()
        await channel.close()


async def test_what_a_revoked_node_has_borrowed_ends_and_it_gets_no_more() -> None:
    a, b, relay = End("a"), End("b"), End("relay", relay=True)
    async with started(a, b, relay):
        b.lend(relay)
        a.relay = relay
        channel = a.to("b")
        assert await ping(channel) == b"hello"
        relay.server.callers.revoke(["a"])
        await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), PATIENCE)
        with pytest.raises(grpc.aio.AioRpcError):
            await method(channel, "Ping")(b"", timeout=1.5, wait_for_ready=True)


async def test_a_node_that_is_no_relay_passes_nothing_on() -> None:
    a, b, other = End("a"), End("b"), End("relay")
    async with started(a, b, other):
        b.lend(other)
        a.relay = other
        with pytest.raises(grpc.aio.AioRpcError):
            await method(a.to("b"), "Ping")(b"", timeout=1.5, wait_for_ready=True)
        assert await other.holder.take("b", PATIENCE)


async def test_a_node_that_has_lent_nothing_is_not_reached() -> None:
    a = End("a")
    async with started(a):
        with pytest.raises(NotLent, match="b has lent no connection"):
            await a.holder.take("b", 0.1)


async def test_a_holder_keeps_no_more_than_the_spare_ones() -> None:
    a, b = End("a"), End("b")
    async with started(a, b):
        channel = b.dial(a)
        calls = [method(channel, "Lend")(metadata=((NODE_METADATA, "b"),)) for _ in range(lent_connections.SPARE + 1)]
        reads = [asyncio.create_task(call.read()) for call in calls]
        done, waiting = await asyncio.wait(reads, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [grpc.aio.EOF], "one is given back"
        assert len(waiting) == lent_connections.SPARE
        for call in calls:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await channel.close()


async def test_a_lost_lender_ends_the_connections_that_use_it() -> None:
    a, b, relay = End("a"), End("b"), End("relay", relay=True)
    async with started(a, relay):
        await b.start()
        b.lend(relay)
        a.relay = relay
        channel = a.to("b")
        assert await ping(channel) == b"hello"
        await b.stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await method(channel, "Ping")(b"", timeout=2)
        for _ in range(500):
            if relay.server.callers._calls:  # both calls end
                await asyncio.sleep(0.02)
        assert not relay.server.callers._calls


async def test_only_this_user_finds_the_doors_and_they_are_gone_with_the_process() -> None:
    a = End("a")
    await a.start()
    path = Path(a.doors.to("b").removeprefix("unix:"))
    socket, folder = await asyncio.to_thread(path.stat), await asyncio.to_thread(path.parent.stat)
    assert (stat.S_ISSOCK(socket.st_mode), stat.S_IMODE(folder.st_mode)) == (True, 0o700)
    assert a.doors.to("b") == f"unix:{path}", "one for each node"
    await a.stop()
    assert not await asyncio.to_thread(path.parent.exists)


async def test_a_connection_that_speaks_before_it_is_taken_is_given_back() -> None:
    async def speech() -> AsyncIterator[bytes]:
        yield b"the lender listens, and only answers"
        await asyncio.Event().wait()

    holder = Holder()
    await holder.serve_lender("b", "key", speech(), cast(lent_connections.Context, None))
    with pytest.raises(NotLent):
        await holder.take("b", 0.0)


async def test_lenders_that_come_and_go_leave_nothing_behind() -> None:
    async def ends_at_once() -> AsyncIterator[bytes]:
        return
        yield b""

    holder = Holder()
    lending = [
        asyncio.create_task(holder.serve_lender("b", "key", ends_at_once(), cast(lent_connections.Context, None)))
        for _ in range(3)
    ]
    await asyncio.sleep(0)
    lending[-1].cancel()
    await asyncio.gather(*lending, return_exceptions=True)
    await asyncio.sleep(2 * SHORT_SECONDS)
    assert not holder._backlogs._behind


async def test_a_used_connection_that_ends_takes_no_waiting_one_with_it() -> None:
    async def silence() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    holder, context = Holder(), cast(lent_connections.Context, None)

    def lend() -> asyncio.Task[None]:
        return asyncio.create_task(holder.serve_lender("b", "key", silence(), context))

    served = [lend(), lend()]
    newer, older = [await holder.take("b", PATIENCE) for _ in served]
    newer.close()
    await asyncio.wait(served, return_when=asyncio.FIRST_COMPLETED)
    served.append(lend())
    await asyncio.sleep(0)  # it is waiting now
    older.close()
    await asyncio.wait(served[:2])
    third = await holder.take("b", 0.5)
    third.close()
    await asyncio.wait(served)

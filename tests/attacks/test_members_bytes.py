"""A key with several names makes calls whose bytes nobody reads: they fill little of a peer's memory, whatever the calls are."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc.aio
import pytest

from dtfm.node.transport.backlogs import MOST_BEHIND
from dtfm.protos.connection import open_channel
from dtfm.protos.identity.credentials import Identity, issue, public_key, read_public_key, to_peer
from dtfm.protos.streams import LENDER_METADATA, NODE_METADATA, method
from tests.cluster.launch import ROOT
from tests.protos.members import AUTHORITY, DAY, key_of

NAMES = 8
CALLS = 16
PIECE = bytes(256 << 10)
MOST_SENT = 20 << 20
"""By each call: more than the peer's window."""
MOST_FILLED = 256 << 20
"""About 100 MiB on a quiet machine. A busy one reads later what has arrived. Without bounds each of these attacks fills a GiB."""

Named = tuple[tuple[str, str], ...]
"""A call's metadata."""


@dataclass
class Port:
    """``most``: the most bytes that its process has had in memory."""

    number: int
    process: int

    @property
    def most(self) -> int:
        status = Path(f"/proc/{self.process}/status").read_text()
        return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


@contextmanager
def port(*arguments: str) -> Iterator[Port]:
    command = [sys.executable, "-m", "tests.attacks.holds_a_port", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield Port(int(process.stdout.readline()), process.pid)


def name(number: int) -> Identity:
    """One of several names of a key."""
    key = key_of("mallory")
    certificate = issue(AUTHORITY, read_public_key(public_key(key)), f"mallory-{number}", datetime.now(UTC), DAY)
    return Identity(AUTHORITY.certificate, certificate, key)


class Sent:
    """``bytes``: of all calls, as far as the peer has taken them."""

    def __init__(self) -> None:
        self.bytes = 0

    async def pour(self, channel: grpc.aio.Channel, call: str = "Upload", named: Named = ()) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(MOST_SENT // len(PIECE)):
                yield PIECE
                self.bytes += len(PIECE)

        pouring = method(channel, call)(pieces(), metadata=named)
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await pouring.code()  # reads no answer

    async def until_it_stands_still(self) -> None:
        before = -1
        while before != self.bytes or not self.bytes:
            before = self.bytes
            await asyncio.sleep(1.0)


async def test_eight_names_of_one_key_fill_little_by_probes() -> None:
    with port() as at:
        async with AsyncExitStack() as stack:
            open_, sent = [], Sent()
            for number in range(NAMES):
                channel = open_channel(f"127.0.0.1:{at.number}", to_peer(name(number), "a"))
                open_.append(await stack.enter_async_context(channel))
                await method(open_[-1], "Ping")(b"")
            before = at.most
            pouring = [asyncio.create_task(sent.pour(channel)) for channel in open_ for _ in range(CALLS)]
            await sent.until_it_stands_still()
            print(f"{len(pouring)} probes fill {(at.most - before) / 2**20:.0f} MiB")
            assert at.most - before <= MOST_FILLED
            for task in pouring:
                task.cancel()
            await asyncio.gather(*pouring, return_exceptions=True)


def deaf_channel(port: int, identity: Identity) -> grpc.aio.Channel:
    """Its other end may send little that this one does not read."""
    credentials, named = to_peer(identity, "a")
    narrow = (("grpc.http2.lookahead_bytes", 64 << 10), ("grpc.http2.bdp_probe", 0))
    own = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=(*named, *narrow, *own))


async def test_names_of_one_key_that_lend_to_each_other_and_do_not_read_fill_little_of_a_relay() -> None:
    async with AsyncExitStack() as stack:
        at, sent, pouring = stack.enter_context(port("relay")), Sent(), []
        channels = [await stack.enter_async_context(deaf_channel(at.number, name(n))) for n in range(NAMES)]
        for channel in channels:
            await method(channel, "Ping")(b"")
        before = at.most
        for number, channel in enumerate(channels):
            lender = f"mallory-{number}"
            for _ in range(CALLS // 2):
                lent = method(channel, "Lend")(metadata=((NODE_METADATA, lender),))
                stack.callback(lent.cancel)
                named = ((NODE_METADATA, lender), (LENDER_METADATA, lender))
                pouring.append(asyncio.create_task(sent.pour(channel, "Borrow", named)))
                await lent.read()  # the two are joined
        await sent.until_it_stands_still()
        filled = at.most - before
        left = sum(not call.done() for call in pouring)
        print(f"{len(pouring)} borrowed connections fill {filled / 2**20:.0f} MiB at most; {left} are left")
        assert left == MOST_BEHIND
        assert filled <= MOST_FILLED
        for task in pouring:
            task.cancel()
        await asyncio.gather(*pouring, return_exceptions=True)


@pytest.mark.soak
async def test_large_pings_fill_little() -> None:
    with port() as at:
        async with AsyncExitStack() as stack:
            open_ = [
                await stack.enter_async_context(
                    open_channel(f"127.0.0.1:{at.number}", to_peer(name(number), "a"), apart=True)
                )
                for number in range(2)
            ]
            for channel in open_:
                await method(channel, "Ping")(b"")
            before, large = at.most, bytes(1 << 20)
            pings = [asyncio.ensure_future(method(channel, "Ping")(large)) for channel in open_ for _ in range(240)]
            codes = {error.code() for error in await asyncio.gather(*pings, return_exceptions=True)}  # type: ignore[union-attr]
            assert codes <= {
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.UNAVAILABLE,  # the connection has too many calls
            }
            print(f"480 pings of a MiB fill {(at.most - before) / 2**20:.0f} MiB")
            assert at.most - before <= MOST_FILLED, "480 MiB were sent"
            for channel in open_:
                assert await method(channel, "Ping")(b"after") == b"after"

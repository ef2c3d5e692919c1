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

from dtfm.protos.connection import open_channel
from dtfm.protos.identity.credentials import Identity, issue, public_key, read_public_key, to_peer
from dtfm.protos.streams import method
from tests.cluster.launch import ROOT
from tests.protos.members import AUTHORITY, DAY, key_of

NAMES = 8
CALLS = 16
PIECE = bytes(256 << 10)
MOST_SENT = 20 << 20
"""By each call: more than the peer's window."""
MOST_FILLED = 100 << 20


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
def port() -> Iterator[Port]:
    command = [sys.executable, "-m", "tests.attacks.holds_a_port"]
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

    async def pour(self, channel: grpc.aio.Channel) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(MOST_SENT // len(PIECE)):
                yield PIECE
                self.bytes += len(PIECE)

        pouring = method(channel, "Upload")(pieces())
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
            assert at.most - before <= MOST_FILLED
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
            assert at.most - before <= 2 * MOST_FILLED, "480 MiB were sent"
            for channel in open_:
                assert await method(channel, "Ping")(b"after") == b"after"

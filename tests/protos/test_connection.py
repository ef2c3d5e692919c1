"""How a connection is opened."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from dtfm.protos.connection import open_channel, read_address, server_options
from dtfm.protos.identity.credentials import peer_credentials, to_peer
from dtfm.protos.streams import handlers, method
from tests.protos.members import member

FAR_SECONDS = 0.25
"""One-way latency, more than between any two places on Earth over cables."""


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:7400", "127.0.0.1", 7400), ("gpu-box.lan:0", "gpu-box.lan", 0), ("[::1]:65535", "::1", 65535)],
)
def test_addresses_are_read(text: str, host: str, port: int) -> None:
    assert read_address(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "host",
        "host:",
        ":7400",
        "host:http",
        "host:65536",
        "host:-1",
        "::1:7400",
        "a b:1",
        "h" * 300 + ":1",
        "h:٣",
    ],
)
def test_an_invalid_address_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        read_address(text)


async def test_a_port_in_use_is_refused_and_not_shared() -> None:
    first = grpc.aio.server(options=server_options())
    port = first.add_insecure_port("127.0.0.1:0")
    second = grpc.aio.server(options=server_options())
    with pytest.raises(RuntimeError):
        second.add_insecure_port(f"127.0.0.1:{port}")


async def echo(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    return request


async def test_the_first_call_to_the_other_side_of_the_world_succeeds() -> None:
    """A connection takes several round trips, and one attempt must have the time for them."""
    near = member("near")
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((handlers({"Ping": echo}),))
    port = server.add_secure_port("127.0.0.1:0", peer_credentials(lambda: near))
    await server.start()
    loop = asyncio.get_running_loop()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            loop.call_later(FAR_SECONDS, writer.write, data)
        loop.call_later(FAR_SECONDS, writer.close)

    async def link(near: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        far, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(near, far_writer), carry(far, near_writer))

    link_server = await asyncio.start_server(link, "127.0.0.1", 0)
    try:
        address = f"127.0.0.1:{link_server.sockets[0].getsockname()[1]}"
        async with open_channel(address, to_peer(member("far"), "near"), lease=2.0) as channel:
            assert await method(channel, "Ping")(b"hello") == b"hello"
    finally:
        link_server.close()
        await server.stop(None)

"""How a connection is opened."""

from __future__ import annotations

import grpc.aio
import pytest

from dtfm.protos.connection import read_address, server_options, shows_token, token_metadata


def test_a_shown_token_is_accepted_and_any_other_is_not() -> None:
    assert shows_token(token_metadata("secret"), "secret")
    assert shows_token((("authorization", b"Bearer secret"),), "secret")
    assert not shows_token(token_metadata("secret2"), "secret")
    assert not shows_token((("authorization", "secret"),), "secret")
    assert not shows_token((), "secret")
    assert not shows_token(None, "secret")


def test_without_a_token_everybody_may_come() -> None:
    assert token_metadata("") == ()
    assert shows_token(None, "")


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
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is no address"):
        read_address(text)


async def test_a_port_in_use_is_refused_not_shared() -> None:
    first = grpc.aio.server(options=server_options())
    port = first.add_insecure_port("127.0.0.1:0")
    second = grpc.aio.server(options=server_options())
    with pytest.raises(RuntimeError):
        second.add_insecure_port(f"127.0.0.1:{port}")

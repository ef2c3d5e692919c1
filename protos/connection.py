"""How a connection is opened, on both ends: channel options, message bounds, the token. Who may be there: credentials.py."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

import grpc
import grpc.aio

MAX_MESSAGE_BYTES = 4 << 20
"""Largest single gRPC message either side takes: a tensor frame is at most 1 MiB, a probe of 1,000 links far less."""

Metadata = tuple[tuple[str, str], ...]
Way = tuple[grpc.ChannelCredentials, tuple[tuple[str, str], ...]]
"""To whom a channel leads: what credentials.to_coordinator and to_peer give."""

LOOKAHEAD_BYTES = 16 << 20
"""What may be on its way to a receiver beyond what it has read, per stream: fills 1 Gbit/s over a round trip of 130 ms."""

_COMMON = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
)


def channel_options(lease: float) -> tuple[tuple[str, int], ...]:
    """Bounded messages, room for a fast and far link, no proxy (peers are named by address), reconnects that come back within
    seconds, and an end to connections whose other side has said nothing, not even to a ping, for about ``lease`` seconds."""
    half = max(int(lease * 500), 100)
    return (
        *_COMMON,
        ("grpc.keepalive_time_ms", half),
        ("grpc.keepalive_timeout_ms", half),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        # In spite of its name what one attempt may take: TCP, TLS and HTTP/2 make several round trips of up to 0.5 s.
        ("grpc.min_reconnect_backoff_ms", 2 * half),
        ("grpc.max_reconnect_backoff_ms", 5_000),
    )


def server_options() -> tuple[tuple[str, int], ...]:
    """Bounded messages, room for a fast and far link, clients' pings welcome, and a port in use refused rather than shared."""
    return (
        *_COMMON,
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
    )


DEFAULT_LEASE = 10.0
"""Seconds; that of a run file which does not say. Until a node knows its run's."""


def open_channel(address: str, way: Way, lease: float = DEFAULT_LEASE, apart: bool = False) -> grpc.aio.Channel:
    """An encrypted channel to HOST:PORT, where nobody else than ``way`` says is accepted. Connects at the first call; close it
    with ``await channel.close()``. ``apart``: it shares its TCP connection with no other channel."""
    credentials, named = way
    own = (("grpc.use_local_subchannel_pool", int(apart)),)
    return grpc.aio.secure_channel(address, credentials, options=(*channel_options(lease), *named, *own))


def token_metadata(token: str) -> Metadata:
    """What a call carries to show ``token``; nothing where there is none."""
    return (("authorization", f"Bearer {token}"),) if token else ()


def shows_token(metadata: Iterable[tuple[str, str | bytes]] | None, token: str) -> bool:
    """Whether a call's metadata shows ``token`` (an empty one: always). Takes the same time wherever they differ."""
    if not token:
        return True
    shown = next((value for key, value in metadata or () if key == "authorization"), "")
    shown = shown.decode("latin-1") if isinstance(shown, bytes) else shown
    return hmac.compare_digest(shown.encode(), f"Bearer {token}".encode())


def read_address(text: str) -> tuple[str, int]:
    """HOST:PORT as (host, port); an IPv6 host stands in brackets, which are taken off. Raises ValueError."""
    host, separator, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r} is no address: put an IPv6 host in brackets, like [::1]:7400")
    if not separator or not host or len(text) > 261 or not all(c.isalnum() or c in ".-_:%" for c in host):
        raise ValueError(f"{text!r} is no address: give HOST:PORT, like 192.168.1.20:7400")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise ValueError(f"{text!r} is no address: the port must be a number from 0 to 65535, got {port!r}")
    return host, int(port)

"""How a connection is opened, on both ends: channel options, message bounds. credentials.py says who may connect."""

from __future__ import annotations

import grpc
import grpc.aio

MAX_MESSAGE_BYTES = 4 << 20
"""Largest single gRPC message that either side accepts. A tensor frame has at most 1 MiB, a report on 1,000 links far less."""

Way = tuple[grpc.ChannelCredentials, tuple[tuple[str, str], ...]]
"""Credentials and channel options that fix who is at the other end: credentials.to_coordinator and to_peer make them."""

LOOKAHEAD_BYTES = 16 << 20
"""Bytes that a sender may be ahead of what the receiver has read, per stream: fills 1 Gbit/s at a round trip of 130 ms."""

_COMMON = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
)


def channel_options(lease: float) -> tuple[tuple[str, int], ...]:
    """Options of a client's channel.

    They bound messages, leave room for a fast and far link, reconnect within seconds, and close a connection whose other side has
    answered nothing, not even a ping, for about ``lease`` seconds.
    """
    half = max(int(lease * 500), 100)
    return (
        *_COMMON,
        ("grpc.keepalive_time_ms", half),
        ("grpc.keepalive_timeout_ms", half),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        # Despite its name, the time one attempt may take: TCP, TLS and HTTP/2 need several round trips of up to 0.5 s.
        ("grpc.min_reconnect_backoff_ms", 2 * half),
        ("grpc.max_reconnect_backoff_ms", 5_000),
    )


def server_options() -> tuple[tuple[str, int], ...]:
    """Options of a server: bounded messages, room for a fast and far link, pings allowed, a port in use refused and
    not shared."""
    return (
        *_COMMON,
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
    )


DEFAULT_LEASE = 10.0
"""Seconds. The default lease of a run file, which a node uses until it knows its run's."""


def open_channel(
    address: str, way: Way, lease: float = DEFAULT_LEASE, apart: bool = False, proxy: str = ""
) -> grpc.aio.Channel:
    """An encrypted channel to HOST:PORT, which accepts only the other side that ``way`` names.

    Connects at the first call; close it with ``await channel.close()``. With ``apart`` it shares its TCP connection
    with no other channel. ``proxy``: the URL of an HTTP proxy that is asked to CONNECT to the address.
    """
    credentials, named = way
    # Peers are named by address: no proxy of the environment's is meant for them.
    through: tuple[tuple[str, str | int], ...] = (("grpc.enable_http_proxy", 0),)
    if proxy:
        through = (("grpc.enable_http_proxy", 1), ("grpc.http_proxy", proxy))
    own = (("grpc.use_local_subchannel_pool", int(apart)),)
    return grpc.aio.secure_channel(address, credentials, options=(*channel_options(lease), *named, *through, *own))


_MOST_SHOWN = 24  # the secret begins after 64 characters of an invitation


def read_address(text: str) -> tuple[str, int]:
    """Splits HOST:PORT into host and port, and removes the brackets of an IPv6 host. Raises ValueError, which shows only the
    beginning of a long text: it may be a damaged invitation."""
    shown = repr(text) if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]!r}..."
    host, separator, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{shown} is not an address: put an IPv6 host in brackets, like [::1]:7400")
    if not separator or not host or len(text) > 261 or not all(c.isalnum() or c in ".-_:%" for c in host):
        raise ValueError(f"{shown} is not an address: give HOST:PORT, like 192.168.1.20:7400")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise ValueError(f"{shown} is not an address: the port must be a number from 0 to 65535")
    return host, int(port)

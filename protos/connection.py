"""How a connection is opened, on both ends: channel options, message bounds. credentials.py says who may connect."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import grpc
import grpc.aio

from dtfm.protos.frame import MAX_FRAME_BYTES

MAX_MESSAGE_BYTES = 4 << 20
"""Largest single gRPC message that either side accepts. A tensor frame has at most 1 MiB, a report on 1,000 links far less."""

REFUSED_BY_NAME_BYTES = 4 << 10
"""Beyond a frame, what a node still reads of a message, so that it can say what is wrong with it."""

Way = tuple[grpc.ChannelCredentials, tuple[tuple[str, str | int], ...]]
"""Credentials and channel options that fix who is at the other end: credentials.to_coordinator and to_peer make them."""

LOOKAHEAD_BYTES = 16 << 20
"""Bytes that a sender may be ahead of what the receiver has read, per stream: fills 1 Gbit/s at a round trip of 130 ms."""

RELAY_LOOKAHEAD_BYTES = 2 << 20
"""The same at a relay, where bytes of many streams may wait: fills 100 Mbit/s at a round trip of 160 ms."""

CONTROL_LOOKAHEAD_BYTES = 64 << 10
"""The same for what nodes tell the coordinator."""

HANDSHAKE_SECONDS = 10.0
"""How long a connection may take from TCP's to the end of HTTP/2's greeting: a few round trips of up to half a second."""
MOST_CALLS_OF_A_CONNECTION = 24
"""Calls at a time over a connection from one node to another. A node makes about four, and more wait there. The first bytes of
each are taken before it is known who makes it."""
MOST_CONNECTIONS = 4096
"""To one node. A member has about four for each of its peers, and strangers HANDSHAKE_SECONDS each."""
MOST_METADATA_BYTES = 8 << 10
"""A call's headers; a token has some hundred bytes."""

_CAREFUL = (
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
    ("grpc.max_metadata_size", MOST_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MOST_METADATA_BYTES),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
)


def channel_options(lease: float) -> tuple[tuple[str, int], ...]:
    """Options of a client's channel.

    They bound messages, leave room for a fast and far link, reconnect within seconds, and close a connection whose other side has
    answered nothing, not even a ping, for about ``lease`` seconds.
    """
    half = max(int(lease * 500), 100)
    return (
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", half),
        ("grpc.keepalive_timeout_ms", half),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        # Despite its name, the time one attempt may take: TCP, TLS and HTTP/2 need several round trips of up to 0.5 s.
        ("grpc.min_reconnect_backoff_ms", 2 * half),
        ("grpc.max_reconnect_backoff_ms", 5_000),
    )


def server_options(relay: bool = False) -> tuple[tuple[str, int], ...]:
    """Options of a node's server: messages of a frame at most, room for a fast and far link, pings allowed, a port in use refused
    and not shared. A connection that has not shown a certificate in time is closed, and so is each that is one too many.
    ``relay``: it also passes on what others send."""
    return (
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.http2.lookahead_bytes", RELAY_LOOKAHEAD_BYTES if relay else LOOKAHEAD_BYTES),
        ("grpc.http2.bdp_probe", int(not relay)),  # it would widen the window
        ("grpc.max_receive_message_length", MAX_FRAME_BYTES + REFUSED_BY_NAME_BYTES),
        *_CAREFUL,
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", MOST_CALLS_OF_A_CONNECTION),
        ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
    )


def coordinator_options() -> tuple[tuple[str, int], ...]:
    """Options of the coordinator's server, whose callers may be strangers, and say little: what nobody reads yet stays with the
    sender. It listens behind its front, on no port."""
    return (
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.http2.lookahead_bytes", CONTROL_LOOKAHEAD_BYTES),
        ("grpc.http2.bdp_probe", 0),  # it would widen the window
        ("grpc.max_connection_idle_ms", 300_000),
        ("grpc.max_concurrent_streams", 32),  # those of strangers cost as much as members'
        *_CAREFUL,
    )


DEFAULT_LEASE = 10.0
"""Seconds. The default lease of a run file, which a node uses until it knows its run's."""


def open_channel(address: str, way: Way, lease: float = DEFAULT_LEASE, apart: bool = False) -> grpc.aio.Channel:
    """An encrypted channel to HOST:PORT, or what else gRPC dials, which accepts only the other side that ``way`` names.

    Connects at the first call; close it with ``await channel.close()``. With ``apart`` it shares its TCP connection
    with no other channel.
    """
    credentials, named = way
    # Peers are named by address: no proxy of the environment's is meant for them.
    own = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", int(apart)))
    return grpc.aio.secure_channel(address, credentials, options=(*channel_options(lease), *named, *own))


_MOST_SHOWN = 24  # the secret begins after 64 characters of an invitation


def read_address(text: str) -> tuple[str, int]:
    """Splits HOST:PORT into host and port, and removes the brackets of an IPv6 host. Raises ValueError, which shows only the
    beginning of a long text: it may be a damaged invitation."""
    shown = repr(text) if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]!r}..."
    if "://" in text:
        raise ValueError(f"{shown} is not an address but a URL: give HOST:PORT alone, like 192.168.1.20:7400")
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


def address_of(host: str | IPv4Address | IPv6Address, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def with_port(text: str, port: int) -> str:
    """HOST:PORT of a ``text`` that may lack the port, and around an IPv6 address the brackets. It is not checked."""
    bare = text if text.startswith("[") or text.count(":") < 2 else f"[{text}]"
    return bare if ":" in bare.rpartition("]")[2] else f"{bare}:{port}"

"""The methods that nodes call on each other. Tensors travel as raw bytes; only requests for them are messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

SERVICE = "dtfm.Peer"
CONNECTIONS = "dtfm.Connections"
NODE_METADATA = "dtfm-node"
"""Metadata key with the name of the calling node."""

SEEN_METADATA = "dtfm-seen"
"""Metadata key with the address from which a caller came, as gRPC writes it."""
LENDER_METADATA = "dtfm-lender"
"""Metadata key with the name of the node to which a connection is to be borrowed."""

FrameStream = Callable[[AsyncIterator[bytes], "grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[bytes]]
BytesToBytes = Callable[[bytes, "grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[bytes]]
BytesToStream = Callable[[bytes, "grpc.aio.ServicerContext[bytes, bytes]"], AsyncIterator[bytes]]
StreamToStream = Callable[[AsyncIterator[bytes], "grpc.aio.ServicerContext[bytes, bytes]"], AsyncIterator[bytes]]
Connection = Callable[[AsyncIterator[bytes], "grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[None]]


def peer_handlers(
    tensors: FrameStream,
    ping: BytesToBytes,
    upload: StreamToStream,
    download: StreamToStream,
    state: BytesToStream,
    standby: BytesToStream,
    kept: BytesToStream,
) -> grpc.GenericRpcHandler:
    """The server side of the methods.

    - ``tensors`` takes frames of frame.py until the caller ends the call. A refusal is an answer that ends the call,
      not a status: where the end of a call meets a write of the caller's, grpc replaces the status with its own
      INTERNAL.
    - ``ping`` echoes. Its trailing metadata say as whom the server saw the caller (SEEN_METADATA).
    - ``upload`` and ``download`` carry a bandwidth probe, to the server and from it. The receiver answers each piece
      with its size (ASCII decimal).
    - ``state`` answers a StateRequest with STATE frames.
    - ``standby`` answers a StandbyRequest with STATE frames of each bucket and then, until the caller ends the call,
      with UPDATE and COMMITTED frames for each step.
    - ``kept`` answers a KeptRequest with the frames of that tensor.
    """
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Tensors": grpc.stream_unary_rpc_method_handler(tensors),
            "Ping": grpc.unary_unary_rpc_method_handler(ping),
            "Upload": grpc.stream_stream_rpc_method_handler(upload),
            "Download": grpc.stream_stream_rpc_method_handler(download),
            "State": grpc.unary_stream_rpc_method_handler(state),
            "Standby": grpc.unary_stream_rpc_method_handler(standby),
            "Kept": grpc.unary_stream_rpc_method_handler(kept),
        },
    )


def connection_handlers(lend: Connection, borrow: Connection) -> grpc.GenericRpcHandler:
    """The server side of the methods that carry connections (node/transport/lent.py). Messages are pieces of at most 256 KiB.

    - ``lend``: the caller lends the connection to itself that the call is.
    - ``borrow``: the caller wants a connection that the node named in the metadata (LENDER_METADATA) has lent.
    """
    return grpc.method_handlers_generic_handler(
        CONNECTIONS,
        {
            "Lend": grpc.stream_stream_rpc_method_handler(lend),
            "Borrow": grpc.stream_stream_rpc_method_handler(borrow),
        },
    )


def tensors_call(channel: grpc.aio.Channel) -> Any:
    return channel.stream_unary(f"/{SERVICE}/Tensors")


def ping_call(channel: grpc.aio.Channel) -> Any:
    return channel.unary_unary(f"/{SERVICE}/Ping")


async def seen_as(call: Any) -> str:
    """What the server of a finished ``ping`` said about where the caller came from; empty if nothing."""
    shown = next((value for key, value in await call.trailing_metadata() if key == SEEN_METADATA), "")
    return shown if isinstance(shown, str) else ""


def upload_call(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(f"/{SERVICE}/Upload")


def download_call(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(f"/{SERVICE}/Download")


def state_call(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream(f"/{SERVICE}/State")


def standby_call(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream(f"/{SERVICE}/Standby")


def kept_call(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream(f"/{SERVICE}/Kept")


def lend_call(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(f"/{CONNECTIONS}/Lend")


def borrow_call(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(f"/{CONNECTIONS}/Borrow")

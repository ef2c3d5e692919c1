"""The node-to-node methods. All but the State and Standby requests carry raw bytes: no message is built around a tensor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

SERVICE = "dtfm.Peer"
NODE_METADATA = "dtfm-node"
"""Metadata key under which the calling node names itself."""

FrameStream = Callable[[AsyncIterator[bytes], "grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[bytes]]
BytesToBytes = Callable[[bytes, "grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[bytes]]
BytesToStream = Callable[[bytes, "grpc.aio.ServicerContext[bytes, bytes]"], AsyncIterator[bytes]]
StreamToStream = Callable[[AsyncIterator[bytes], "grpc.aio.ServicerContext[bytes, bytes]"], AsyncIterator[bytes]]


def peer_handlers(
    tensors: FrameStream,
    ping: BytesToBytes,
    upload: StreamToStream,
    download: StreamToStream,
    state: BytesToStream,
    standby: BytesToStream,
) -> grpc.GenericRpcHandler:
    """The server side.

    ``tensors``: frames of frame.py, for as long as the caller is there; a refusal is the answer, and ends the call (a status
    would not do: where the call's end meets a write of the caller's, grpc puts its own INTERNAL in its place). ``ping``:
    echoes. ``upload`` and ``download``: a burst of bytes, there and back; who gets a piece
    answers with its size (ASCII decimal). ``state``: a StateRequest, answered by STATE frames.
    ``standby``: a StandbyRequest, answered by STATE frames of each bucket, then, for as long as the caller is there, UPDATE
    and COMMITTED frames for each step.
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
        },
    )


def tensors_call(channel: grpc.aio.Channel) -> Any:
    return channel.stream_unary(f"/{SERVICE}/Tensors")


def ping_call(channel: grpc.aio.Channel) -> Any:
    return channel.unary_unary(f"/{SERVICE}/Ping")


def upload_call(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(f"/{SERVICE}/Upload")


def download_call(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(f"/{SERVICE}/Download")


def state_call(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream(f"/{SERVICE}/State")


def standby_call(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream(f"/{SERVICE}/Standby")

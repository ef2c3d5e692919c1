"""The methods that nodes call on each other. Tensors travel as raw bytes; only requests for them are messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, TypeVar

import grpc
import grpc.aio

Request = TypeVar("Request")

SERVICE = "dtfm.Peer"
NODE_METADATA = "dtfm-node"
"""Metadata key with the name of the calling node."""

SEEN_METADATA = "dtfm-seen"
"""Metadata key with the address from which a caller came, as gRPC writes it."""
LENDER_METADATA = "dtfm-lender"
"""Metadata key with the name of the node to which a connection is to be borrowed."""

METHODS = {
    "Tensors": "stream_unary",
    "Ping": "unary_unary",
    "Upload": "stream_stream",
    "Download": "stream_stream",
    "State": "unary_stream",
    "Standby": "unary_stream",
    "Kept": "unary_stream",
    "Lend": "stream_stream",
    "Borrow": "stream_stream",
}
"""Each method's kind, as gRPC calls it. Requests and answers are bytes.

- ``Tensors`` takes frames of frame.py until the caller ends the call. A refusal is an answer that ends the call,
  not a status: where the end of a call meets a write of the caller's, grpc replaces the status with its own
  INTERNAL.
- ``Ping`` echoes. Its trailing metadata say as whom the server saw the caller (SEEN_METADATA).
- ``Upload`` and ``Download`` carry a bandwidth probe, to the server and from it. The receiver answers each piece
  with its size (ASCII decimal).
- ``State`` answers a StateRequest with STATE frames.
- ``Standby`` answers a StandbyRequest with STATE frames of each bucket and then, until the caller ends the call,
  with UPDATE and COMMITTED frames for each step.
- ``Kept`` answers a KeptRequest with the frames of that tensor.
- ``Lend`` and ``Borrow`` carry connections (node/transport/lent_connections.py), in pieces of at most 256 KiB. ``Lend``: the
  caller lends the connection to itself that the call is. ``Borrow``: the caller wants a connection that the node named in the
  metadata (LENDER_METADATA) has lent.
"""


def handlers(methods: Mapping[str, Callable[..., Any]]) -> grpc.GenericRpcHandler:
    """Returns what answers these methods' calls on a server, by their names."""
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {name: getattr(grpc, f"{METHODS[name]}_rpc_method_handler")(answer) for name, answer in methods.items()},
    )


async def requests_of(context: grpc.aio.ServicerContext[Request, Any]) -> AsyncIterator[Request]:
    """The requests of a call, as they come. gRPC's own iterator keeps the call, with what was sent, for ever unless it is read to
    the end."""
    while (request := await context.read()) is not grpc.aio.EOF:
        yield request


def method(channel: grpc.aio.Channel, name: str) -> Any:
    """Returns what calls the method on the node at the other end of ``channel``."""
    return getattr(channel, METHODS[name])(f"/{SERVICE}/{name}")


def told(metadata: Iterable[tuple[str, str | bytes]] | None, key: str) -> str:
    """What a call's metadata say under this key; empty if nothing."""
    value = next((value for name, value in metadata or () if name == key), "")
    return value if isinstance(value, str) else value.decode("latin-1")


async def seen_as(call: Any) -> str:
    """What the server of a finished ``Ping`` said about where the caller came from; empty if nothing."""
    return told(await call.trailing_metadata(), SEEN_METADATA)

"""Reads what a coordinator knows, from a running one or from its store."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

from dtfm.coordinator.log.store import Record, Store
from dtfm.protos import control_pb2 as wire
from dtfm.protos import control_pb2_grpc
from dtfm.protos.connection import DEFAULT_LEASE, open_channel, read_address, token_metadata
from dtfm.protos.credentials import fetch_authority, to_coordinator

Reply = TypeVar("Reply")


async def records(address: str, store_url: str, token: str, *, after: int = 0, follow: bool) -> AsyncIterator[Record]:
    """Yields the event log from sequence number ``after`` on.

    From a running coordinator at ``address``, or, when ``store_url`` is given, from the store, which is not followed.
    With ``follow``, goes on with new events until the coordinator ends. Raises ValueError.
    """
    if store_url:
        with Store(store_url, write=False) as store:
            for record in store.read(after):
                yield record
        return
    async with await _open(address, token) as channel:
        stub = control_pb2_grpc.ObserverStub(channel)  # type: ignore[no-untyped-call]
        heard = False
        try:
            request = wire.EventsRequest(after=after, follow=follow)
            async for reply in stub.Events(request, metadata=token_metadata(token)):
                heard = True
                yield Record.from_json(json.loads(reply.event_json))
        except grpc.aio.AioRpcError as error:
            if not (follow and heard and error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)):
                raise _explained(address, error) from None


async def ask(
    address: str,
    token: str,
    call: Callable[[control_pb2_grpc.ObserverStub], Callable[..., Awaitable[Reply]]],
    request: object,
) -> Reply:
    """Makes one call of the Observer service.

    Raises ValueError when the coordinator does not answer, or refuses.
    """
    async with await _open(address, token) as channel:
        stub = control_pb2_grpc.ObserverStub(channel)  # type: ignore[no-untyped-call]
        try:
            return await call(stub)(request, metadata=token_metadata(token))
        except grpc.aio.AioRpcError as error:
            raise _explained(address, error) from None


async def _open(address: str, token: str) -> grpc.aio.Channel:
    read_address(address)
    try:
        authority = await fetch_authority(address, token, DEFAULT_LEASE)
    except ConnectionError:
        raise _nobody_answers(address) from None
    except PermissionError as error:
        raise ValueError(str(error)) from None
    return open_channel(address, to_coordinator(authority))


def _nobody_answers(address: str) -> ValueError:
    return ValueError(
        f"no coordinator answers at {address}; give its HOST:PORT, or read its log by --store sqlite:///dtfm.db"
    )


def _explained(address: str, error: grpc.aio.AioRpcError) -> ValueError:
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return _nobody_answers(address)
    return ValueError(f"the coordinator at {address} refused: {error.details()}")

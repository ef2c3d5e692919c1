"""The gRPC services, for nodes and for observers; both hand over to the server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from dtfm.coordinator.log.store import StoreError
from dtfm.coordinator.view.members import member_documents
from dtfm.protos import control_pb2 as wire
from dtfm.protos import control_pb2_grpc

if TYPE_CHECKING:
    from dtfm.coordinator.service.server import Server

Context = grpc.aio.ServicerContext[Any, Any]


class Joins(control_pb2_grpc.CoordinatorServicer):
    def __init__(self, server: Server) -> None:
        self._server = server

    async def Join(self, requests: AsyncIterator[wire.NodeMessage], context: Context) -> None:
        await self._server.join(requests, self._server.allows(context), context)


class Observers(control_pb2_grpc.ObserverServicer):
    def __init__(self, server: Server) -> None:
        self._server = server

    async def Members(self, _request: wire.MembersRequest, context: Context) -> wire.MembersReply:
        await self._admit(context)
        documents = member_documents(self._server.state.ledger)
        return wire.MembersReply(members_json=[json.dumps(document) for document in documents])

    async def Events(self, request: wire.EventsRequest, context: Context) -> AsyncIterator[wire.EventRecord]:
        await self._admit(context)
        try:
            async for record in self._server.records(request.after, request.follow):
                yield wire.EventRecord(sequence=record.sequence, event_json=json.dumps(record.to_json()))
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def PlanNow(self, _request: wire.PlanNowRequest, context: Context) -> wire.PlanNowReply:
        await self._admit(context)
        answer = await self._server.plan_now()
        return wire.PlanNowReply(changed=answer.changed, generation=answer.generation, reason=answer.reason)

    async def _admit(self, context: Context) -> None:
        if not self._server.allows(context):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the token is missing or wrong; give it with --token-file or DTFM_TOKEN",
            )

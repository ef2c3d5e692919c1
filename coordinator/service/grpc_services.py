"""The gRPC services: Coordinator for nodes, Observer for people and their scripts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
import grpc.aio

from dtfm.coordinator.core.transition import AnswerPlanNow
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.store import Record, StoreError
from dtfm.coordinator.service.streams import Streams
from dtfm.coordinator.view.members import member_documents
from dtfm.protos import control_pb2 as wire
from dtfm.protos import control_pb2_grpc
from dtfm.protos.candidates import seen_at
from dtfm.protos.connection import shows_token

Context = grpc.aio.ServicerContext[Any, Any]


class Observed(Protocol):
    """What observers ask of the server."""

    @property
    def ledger(self) -> Ledger: ...

    def records(self, after: int, follow: bool) -> AsyncIterator[Record]: ...

    async def plan_now(self) -> AnswerPlanNow: ...


class Joins(control_pb2_grpc.CoordinatorServicer):
    def __init__(self, streams: Streams, token: str) -> None:
        self._streams = streams
        self._token = token

    async def Join(self, requests: AsyncIterator[wire.NodeMessage], context: Context) -> None:
        shown = shows_token(context.invocation_metadata(), self._token)
        address = seen_at(context.peer())
        seen = "" if address is None or address.is_loopback else str(address)
        await self._streams.serve(requests, context.write, shown, seen)


class Observers(control_pb2_grpc.ObserverServicer):
    def __init__(self, observed: Observed, token: str) -> None:
        self._observed = observed
        self._token = token

    async def Members(self, _request: wire.MembersRequest, context: Context) -> wire.MembersReply:
        await self._admit(context)
        documents = member_documents(self._observed.ledger)
        return wire.MembersReply(members_json=[json.dumps(document) for document in documents])

    async def Events(self, request: wire.EventsRequest, context: Context) -> AsyncIterator[wire.EventRecord]:
        await self._admit(context)
        try:
            async for record in self._observed.records(request.after, request.follow):
                yield wire.EventRecord(sequence=record.sequence, event_json=json.dumps(record.to_json()))
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def PlanNow(self, _request: wire.PlanNowRequest, context: Context) -> wire.PlanNowReply:
        await self._admit(context)
        answer = await self._observed.plan_now()
        return wire.PlanNowReply(changed=answer.changed, generation=answer.generation, reason=answer.reason)

    async def _admit(self, context: Context) -> None:
        if not shows_token(context.invocation_metadata(), self._token):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the token is missing or wrong; give it with --token-file or DTFM_TOKEN",
            )

"""The gRPC services: Coordinator for nodes, Observer for people and their scripts."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

from dtfm.coordinator.core.copies.checkpoints import most_bytes
from dtfm.coordinator.core.members.invitations import look
from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.transition import Granted, Request
from dtfm.coordinator.service.checkpoint.disk import Disk, Forbidden
from dtfm.coordinator.service.port.gate import Gate, refuse
from dtfm.coordinator.service.streams import Streams
from dtfm.coordinator.store.record import StoreError
from dtfm.coordinator.view.published import for_members
from dtfm.coordinator.view.story_snapshot import story_format
from dtfm.protos import control_pb2 as wire
from dtfm.protos.candidates import Address
from dtfm.protos.checkpoint_names import gathering_of
from dtfm.protos.identity.access import Role
from dtfm.protos.identity.proof import LET_IN
from dtfm.protos.streams import requests_of

if TYPE_CHECKING:  # it makes the services
    from dtfm.coordinator.service.server import Server

STORY_PIECE = 1 << 19
"""The number of characters of a story in one message."""
Done = TypeVar("Done")
Context = grpc.aio.ServicerContext[Any, Any]


class Joins:
    """``seen`` returns the address of a caller (context.peer())."""

    def __init__(self, streams: Streams, server: Server, gate: Gate, seen: Callable[[str], Address | None]) -> None:
        self._seen = seen
        self._streams = streams
        self._server = server
        self._gate = gate

    async def Join(self, _requests: AsyncIterator[wire.NodeMessage], context: Context) -> None:
        caller = await self._gate.admit(context, "Join")
        await context.send_initial_metadata(LET_IN)  # the caller sends nothing before
        address = self._seen(context.peer())
        seen = "" if address is None or address.is_loopback else str(address)
        await self._streams.serve(requests_of(context), context.write, caller, seen)

    async def Enrol(self, request: wire.EnrolRequest, context: Context) -> Granted:
        await self._gate.check_enrolment(context, request)
        try:
            if request.dry:  # the connection stays a stranger's
                return look(self._server.state, request, time.time())
            reply = _named(await self._server.ask(request), self._server.state)
            self._gate.let_in(context, base64.b64encode(request.public_key).decode())
            return reply
        except Refused as refused:
            await refuse(context, refused)


class Files:
    """Lets members write and read files on the coordinator's disk, in a ``thread`` of its own; operators may read. ``state``
    returns the present state."""

    def __init__(self, state: Callable[[], State], gate: Gate) -> None:
        run = state().run
        self._state = state
        self._disk = Disk(Path(run.own_folder.removeprefix("file://")), run.own_weights, run.own_adapter)
        self._gate = gate
        self.thread = ThreadPoolExecutor(1, "disk")

    async def Put(self, request: wire.PutRequest, context: Context) -> wire.PutReply:
        caller = await self._gate.admit(context, "Put")
        folder, _, file = request.path.partition("/")
        step, run_id = gathering_of(folder) or (0, "")
        state = self._state()
        most = most_bytes(state, caller, step, file) if run_id == state.ledger.run_id else 0
        await self._done(lambda: self._disk.put(request, most), caller, context)
        return wire.PutReply()

    async def Look(self, request: wire.LookRequest, context: Context) -> wire.LookReply:
        caller = await self._gate.admit(context, "Look")
        return wire.LookReply(entries=await self._done(lambda: self._disk.look(request.path), caller, context))

    async def Get(self, request: wire.GetRequest, context: Context) -> wire.GetReply:
        caller = await self._gate.admit(context, "Get")
        piece = partial(self._disk.get, request.path, request.offset, request.length)
        return wire.GetReply(data=await self._done(piece, caller, context))

    async def _done(self, work: Callable[[], Done], caller: str, context: Context) -> Done:
        """The result of ``work``. Ends the call if it fails, or if the caller may not have it."""
        ledger = self._state().ledger
        holder = ledger.access.names.get(caller)
        try:
            if caller not in ledger.members and (holder is None or holder.role != Role.OPERATOR):
                raise Forbidden(f"{caller} is no member now")
            return await asyncio.get_running_loop().run_in_executor(self.thread, work)
        except FileNotFoundError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except Forbidden as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except OSError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        raise AssertionError("abort returns never")


class Observers:
    def __init__(self, server: Server, gate: Gate) -> None:
        self._server = server
        self._gate = gate

    async def Events(self, request: wire.EventsRequest, context: Context) -> AsyncIterator[wire.EventRecord]:
        caller, after = await self._gate.admit(context, "Events"), request.after
        try:
            if request.story_format == story_format():
                snapshot = await self._server.follower.told()
                for line in snapshot.text.split("\n"):
                    text = f"{self._shown_text(line, caller)}\n"
                    for start in range(0, len(text), STORY_PIECE):
                        yield wire.EventRecord(story=text[start : start + STORY_PIECE])
                after = snapshot.sequence
                yield wire.EventRecord(sequence=after)
            async for record in self._server.log.records(after, request.follow):
                self._gate.check_role(caller, "Events")  # it may have been revoked since
                shown = self._shown(record.to_json(), caller)
                yield wire.EventRecord(sequence=record.sequence, event_json=json.dumps(shown))
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except Refused as refused:
            await refuse(context, refused)

    def _shown_text(self, text: str, caller: str) -> str:
        return text if self._gate.sees_addresses(caller) else json.dumps(for_members(json.loads(text)))

    def _shown(self, document: dict[str, Any], caller: str) -> dict[str, Any]:
        return document if self._gate.sees_addresses(caller) else for_members(document)

    async def _ask(self, request: Request, context: Context) -> Granted:
        caller = await self._gate.admit(context, type(request).__name__.removesuffix("Request"))
        try:
            return _named(await self._server.ask(request, caller), self._server.state)
        except Refused as refused:  # what is asked, not who asks
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refused))
        raise AssertionError("abort returns never")

    PlanNow = Invite = Revoke = Expel = Forgive = Steer = _ask


def _named(reply: Granted, state: State) -> Granted:
    """The reply with the run's name, so that people see which of their runs has answered."""
    reply.run = state.run.name
    return reply


class OtherMethods(grpc.GenericRpcHandler):
    """Refuses every unknown method, and counts such calls too. ``called`` hears who calls."""

    def __init__(self, called: Callable[[str], None]) -> None:
        self._called = called

    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.stream_stream_rpc_method_handler(self._refuse)  # reads nothing

    async def _refuse(self, _requests: AsyncIterator[bytes], context: Context) -> None:
        self._called(context.peer())
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method; is one side of another version?")

"""Many nodes without models in one process. Each has its own connection and stream, and follows the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

import grpc.aio

from dtfm.protos import control_pb2 as wire, services
from dtfm.protos.connection import Way, channel_options
from dtfm.protos.identity.credentials import fetch_authority, to_coordinator
from dtfm.protos.identity.invitation import Invitation, read_invitation
from dtfm.protos.identity.proof import proof
from tests.coordinator.answers import answer, links
from tests.coordinator.fake_node import enrolment
from tests.coordinator.script import hello, prepared
from tests.protos.members import key_of


class Member:
    """One node. A heartbeat's count is the time when it was handed to gRPC, in nanoseconds of the monotonic clock."""

    def __init__(
        self,
        name: str,
        invitation: Invitation,
        way: Way,
        micro_batch: int,
        step_seconds: float | None,
    ) -> None:
        self.name = name
        self._invitation = invitation
        self._micro_batch = micro_batch
        self._assignment = wire.Assignment()
        self._step_seconds = step_seconds
        self._outgoing: asyncio.Queue[wire.NodeMessage | None] = asyncio.Queue()
        # Without separate pools, gRPC would put all channels to one address on one connection.
        credentials, named = way
        options = (*channel_options(10.0), *named, ("grpc.use_local_subchannel_pool", 1))
        self._channel = grpc.aio.secure_channel(invitation.addresses[0], credentials, options=options)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._start(self._serve())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._channel.close()

    async def _serve(self) -> None:
        stub = services.stub("Coordinator", self._channel)
        self._say(hello(self.name))
        # The coordinator's log says which nodes were lost.
        with contextlib.suppress(grpc.aio.AioRpcError):
            metadata = proof(key_of(self.name), self.name, self._invitation.pin)
            await stub.Enrol(enrolment(self.name, self._invitation), metadata=metadata)
            async for message in stub.Join(self._messages(), metadata=metadata):
                self._hear(message)

    async def _messages(self) -> AsyncIterator[wire.NodeMessage]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    def _say(self, message: wire.NodeMessage) -> None:
        self._outgoing.put_nowait(message)

    def _hear(self, message: wire.CoordinatorMessage) -> None:
        match message.WhichOneof("message"):
            case "refusal":
                raise RuntimeError(f"{self.name} was refused: {message.refusal.sentence}")
            case "welcome":
                self._start(self._beat(message.welcome.status.heartbeat_seconds))
                self._say(prepared())
            case "probe":
                self._say(links(self.name, [peer.node for peer in message.probe.peers]))
            case "finish":
                self._outgoing.put_nowait(None)
                return
            case "assignment":
                self._assignment = message.assignment
        said = answer(self.name, message, self._assignment, self._micro_batch)
        if said is not None:
            self._start(self._vote(said)) if said.WhichOneof("message") == "step_ready" else self._say(said)

    async def _vote(self, vote: wire.NodeMessage) -> None:
        if self._step_seconds is not None:
            await asyncio.sleep(self._step_seconds)
            self._say(vote)

    async def _beat(self, every: float) -> None:
        await asyncio.sleep(random.uniform(0, every))
        while True:
            heartbeat = wire.Heartbeat(count=time.monotonic_ns())
            self._say(wire.NodeMessage(heartbeat=heartbeat))
            await asyncio.sleep(every)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler({"message": f"{self.name} failed", "exception": error})


class Crowd:
    """``async with``: ``join`` adds members, and the end closes all. A step takes ``step_seconds``; None: it never ends."""

    def __init__(self, invitation: str, micro_batch: int, step_seconds: float | None) -> None:
        self._invitation = read_invitation(invitation)
        self._micro_batch = micro_batch
        self._step_seconds = step_seconds
        self._members: list[Member] = []

    async def __aenter__(self) -> Self:
        _, authority = await fetch_authority(self._invitation.addresses, self._invitation.pin, 10.0)
        self._way = to_coordinator(authority)
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*[member.close() for member in self._members])

    async def join(self, names: Sequence[str], seconds: float) -> None:
        """The members say hello at even intervals over ``seconds``."""
        began = time.monotonic()
        for index, name in enumerate(names):
            await asyncio.sleep(began + seconds * index / len(names) - time.monotonic())
            member = Member(name, self._invitation, self._way, self._micro_batch, self._step_seconds)
            self._members.append(member)
            member.start()

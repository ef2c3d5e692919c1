"""A node without a model, over a real gRPC stream. It answers as a node does, or misbehaves as the test tells it to. As a
standby it does not keep up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlparse

import grpc.aio
from blake3 import blake3

from dtfm.protos import PROTOCOL_VERSION, control_pb2 as wire, services
from dtfm.protos.connection import open_channel
from dtfm.protos.identity.credentials import public_key, to_coordinator
from dtfm.protos.identity.invitation import Invitation
from dtfm.protos.identity.proof import proof
from dtfm.scheduler.formats.plan import unpack_plan
from tests.coordinator.answers import (
    answer,
    bucket_content,
    buckets_of,
    evaluated,
    last_busy,
    links,
    nonce,
    stored,
    uploaded,
)
from tests.coordinator.script import hello, prepared
from tests.protos.members import key_of

Twist = Callable[[wire.NodeMessage], wire.NodeMessage | None]
"""Makes of each message what the node sends in its place; None: nothing."""


class FakeNode:
    """Within its ``async with`` the node joins, and answers until its stream ends. ``welcome``, ``finish`` and ``refusal`` are
    the last such messages that it got; ``error`` is how its stream ended, if not in order."""

    def __init__(
        self,
        authority: bytes,
        name: str,
        /,
        invitation: Invitation,
        twist: Twist | None = None,
        deaf: bool = False,
        **changes: object,
    ) -> None:
        """It enrols by the ``invitation`` first, with its own key. A ``deaf`` node sends heartbeats and ignores all
        messages."""
        self.name = name
        self.finish: wire.Finish | None = None
        self.refusal: wire.Refusal | None = None
        self.welcome: wire.Welcome | None = None
        self.error: grpc.aio.AioRpcError | None = None
        self._address = invitation.addresses[0]
        self._authority = authority
        self._invitation = invitation
        self._deaf = deaf
        self._twist = twist or (lambda message: message)
        self._hello = hello(name, **changes)
        self._outgoing: asyncio.Queue[wire.NodeMessage | None] = asyncio.Queue()
        self._assignment = wire.Assignment()
        self.over = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def say(self, **fields: object) -> None:
        self._say(wire.NodeMessage(**fields))  # type: ignore[arg-type]

    def _say(self, message: wire.NodeMessage) -> None:
        if (twisted := self._twist(message)) is not None:
            self._outgoing.put_nowait(twisted)

    async def _serve(self) -> None:
        async with open_channel(self._address, to_coordinator(self._authority)) as channel:
            stub = services.stub("Coordinator", channel)
            beat = asyncio.create_task(self._beat())
            metadata = proof(key_of(self.name), self.name, self._invitation.pin)
            try:
                await stub.Enrol(enrolment(self.name, self._invitation), metadata=metadata)
                async for message in stub.Join(self._messages(), metadata=metadata):
                    if not self._deaf:
                        self._hear(message)
            except grpc.aio.AioRpcError as error:
                self.error = error
            finally:
                beat.cancel()
                self.over.set()

    async def _messages(self) -> AsyncIterator[wire.NodeMessage]:
        yield self._hello
        while (message := await self._outgoing.get()) is not None:
            yield message

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self.say(heartbeat=wire.Heartbeat())

    def _hear(self, message: wire.CoordinatorMessage) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                self.welcome = message.welcome
                self.say(prepared=prepared().prepared)
            case "refusal":
                self.refusal = message.refusal
            case "probe":
                self.say(links=links(self.name, [peer.node for peer in message.probe.peers]).links)
            case "finish":
                self.finish = message.finish
                self._outgoing.put_nowait(None)
                return
            case "assignment":
                self._assignment = message.assignment
            case "commit":
                self._after(message.commit)
            case "move" if message.move.folder:
                self._write(message.move)
        if (said := answer(self.name, message, self._assignment)) is not None:
            self._say(said)

    def _after(self, commit: wire.Commit) -> None:
        if commit.snapshot:
            files = {
                bucket: (len(bucket_content(bucket)), _digest(bucket))
                for bucket in buckets_of(unpack_plan(self._assignment.plan), self.name)
            }
            self._say(stored(commit.step, files))
        if commit.evaluate and self.name == last_busy(unpack_plan(self._assignment.plan)):
            self._say(evaluated(commit.generation, commit.step))

    def _write(self, upload: wire.Move) -> None:
        folder = Path(urlparse(upload.folder).path)
        folder.mkdir(parents=True, exist_ok=True)
        files = {}
        for part in upload.parts:
            content, digest = bucket_content(part.bucket), _digest(part.bucket)
            (folder / f"bucket-{part.bucket:05d}-{nonce(digest)}.safetensors").write_bytes(content)
            files[part.bucket] = len(content), digest
        self._say(uploaded(upload.step, files))


def _digest(bucket: int) -> bytes:
    return blake3(bucket_content(bucket)).digest()


def enrolment(name: str, invitation: Invitation, owner: str = "") -> wire.EnrolRequest:
    """What a node asks for that shows this invitation, with its ``owner``'s key or its own."""
    return wire.EnrolRequest(
        protocol_version=PROTOCOL_VERSION,
        invitation=invitation.id,
        secret=invitation.secret,
        name=name,
        public_key=public_key(key_of(owner or name)),
        roles=["node"],
    )


def silent(_: wire.NodeMessage) -> None:
    """The node sends nothing after its Hello."""


def no_vote_for(step: int) -> Twist:
    """The node never votes for this step."""
    return lambda message: None if message.step_ready.step == step else message

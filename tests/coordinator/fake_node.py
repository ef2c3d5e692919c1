"""A node without a model, over a real gRPC stream: answers what a node answers, and misbehaves as told. What it copies in
advance it does not keep up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlparse

import grpc.aio
from blake3 import blake3

from dtfm.protos import control_pb2 as wire
from dtfm.protos import control_pb2_grpc
from dtfm.protos.connection import open_channel, token_metadata
from dtfm.protos.credentials import to_coordinator
from tests.coordinator.script import BUCKETS, DIGEST, hello, links, prepared

Twist = Callable[[wire.NodeMessage], wire.NodeMessage | None]
"""What a node sends instead of an answer; None: nothing."""


class FakeNode:
    """``async with``: joins, and serves until its stream ends. ``finish`` and ``refusal`` are the last such words it got."""

    def __init__(
        self,
        address: str,
        authority: bytes,
        name: str,
        /,
        token: str = "",
        twist: Twist | None = None,
        deaf: bool = False,
        **changes: object,
    ) -> None:
        """``deaf``: it beats, and hears nothing."""
        self.name = name
        self.finish: wire.Finish | None = None
        self.refusal: wire.Refusal | None = None
        self.welcome: wire.Welcome | None = None
        self._address = address
        self._authority = authority
        self._token = token
        self._deaf = deaf
        self._twist = twist or (lambda message: message)
        self._hello = hello(name, **changes)
        self._outgoing: asyncio.Queue[wire.NodeMessage | None] = asyncio.Queue()
        self._plan = wire.Assignment()
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
        message = self._twist(wire.NodeMessage(**fields))  # type: ignore[arg-type]
        if message is not None:
            self._outgoing.put_nowait(message)

    async def _serve(self) -> None:
        async with open_channel(self._address, to_coordinator(self._authority)) as channel:
            stub = control_pb2_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]
            beat = asyncio.create_task(self._beat())
            try:
                async for message in stub.Join(self._messages(), metadata=token_metadata(self._token)):
                    if not self._deaf:
                        self._hear(message)
            except grpc.aio.AioRpcError:
                pass
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
            case "assignment":
                self._plan = message.assignment
                self.say(plan_ready=wire.PlanReady(generation=message.assignment.plan.generation))
            case "begin":
                self._vote(message.begin.step)
            case "commit":
                self._conclude(message.commit)
            case "prefetch" if message.prefetch.past_last_layer:
                self.say(prefetched=wire.Prefetched(number=message.prefetch.number, step=self._plan.step))
            case "finish":
                self.finish = message.finish
                self._outgoing.put_nowait(None)

    def _vote(self, step: int) -> None:
        last = self._last
        ready = wire.StepReady(
            generation=self._plan.plan.generation,
            step=step,
            squared_gradient_norm=2.0,
            loss_sum=8.0 / step if last else 0.0,
            samples=8 if last else 0,
            state_digest=DIGEST,
        )
        self.say(step_ready=ready)

    @property
    def _last(self) -> bool:
        """Whether this node is the last of the only route."""
        return self.name == self._plan.plan.routes[0].nodes[-1]

    def _conclude(self, commit: wire.Commit) -> None:
        if commit.checkpoint and self._last:
            self._write(commit.step)
        if commit.evaluate and self._last:
            report = wire.Evaluated(generation=commit.generation, step=commit.step, loss_sum=16.0, samples=8)
            self.say(evaluated=report)
        if commit.pause:
            self.say(applied=wire.Applied(generation=commit.generation, step=commit.step, state_digest=DIGEST))
        else:
            self._vote(commit.step + 1)

    def _write(self, step: int) -> None:
        assert self.welcome is not None
        folder = Path(urlparse(self.welcome.run.checkpoint.uri).path) / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        for bucket in range(BUCKETS):
            name, content = f"bucket-{bucket:05d}.safetensors", b"bucket %d" % bucket
            (folder / name).write_bytes(content)
            written = wire.BucketWritten(
                step=step, bucket=bucket, file=name, size_bytes=len(content), digest=blake3(content).digest()
            )
            self.say(bucket_written=written)


def nan_at(step: int) -> Twist:
    """The loss of this step is NaN, always."""

    def twist(message: wire.NodeMessage) -> wire.NodeMessage:
        if message.step_ready.step == step:
            message.step_ready.loss_sum = math.nan
        return message

    return twist

"""A coordinator that listens on the loopback interface, for tests of the shell with fake nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.service.authority_key import authority_file, authority_key
from dtfm.coordinator.service.first_access import local_operator, node_invitation
from dtfm.coordinator.service.server import Server
from dtfm.coordinator.service.startup import open_run
from dtfm.coordinator.store.store import Store
from dtfm.protos import control_pb2 as wire, services
from dtfm.protos.connection import open_channel
from dtfm.protos.identity.access import Role
from dtfm.protos.identity.credentials import to_coordinator
from dtfm.protos.identity.invitation import Invitation, read_invitation
from dtfm.protos.identity.proof import Metadata, proof
from dtfm.protos.run_file.run_file import RunFile, parse_run
from tests.coordinator.fake_node import FakeNode, enrolment
from tests.coordinator.script import run_table
from tests.coordinator.stores import store_url
from tests.protos.members import key_of


def run_in(folder: Path, **changes: dict[str, Any]) -> RunFile:
    checkpoint = {"uri": (folder / "checkpoints").as_uri(), **changes.pop("checkpoint", {})}
    cluster = {"lease": 2.0, **changes.pop("cluster", {})}
    return parse_run(run_table(checkpoint=checkpoint, cluster=cluster, **changes), "the test")


class Served:
    """A server that runs as long as the test's ``async with``. The test's user is an operator; ``invitation`` is for nodes."""

    def __init__(
        self, server: Server, store: Store, port: int, task: asyncio.Task[int], invitation: Invitation
    ) -> None:
        self.server = server
        self.store = store
        self.address = f"127.0.0.1:{port}"
        self.task = task
        self.invitation = invitation

    def node(self, name: str, **changes: Any) -> FakeNode:
        return FakeNode(self.server.authority.certificate, name, **{"invitation": self.invitation, **changes})

    def channel(self) -> grpc.aio.Channel:
        return open_channel(self.address, to_coordinator(self.server.authority.certificate))

    async def invite(self, role: Role, seconds: float = 3600) -> wire.InviteReply:
        reply = await self.server.ask(wire.InviteRequest(role=role, seconds=seconds, uses=1), self.operator)
        assert isinstance(reply, wire.InviteReply)
        return reply

    async def enrolled(self, name: str, invited: wire.InviteReply | None = None, role: Role = Role.NODE) -> Metadata:
        """Enrols the name, as a node's if it was not ``invited`` for another ``role``. Returns what its calls show."""
        invitation = read_invitation(invited.invitation) if invited is not None else self.invitation
        metadata, request = proof(key_of(name), name, self.server.pin), enrolment(name, invitation)
        request.roles[:] = [role]
        async with self.channel() as channel:
            stub = services.stub("Coordinator", channel)
            await stub.Enrol(request, metadata=metadata)
        return metadata

    @property
    def operator(self) -> str:
        """The test's user."""
        return next(name for name, holder in self.server.ledger.access.names.items() if holder.role == Role.OPERATOR)

    @property
    def events(self) -> list[ev.Event]:
        return [record.event for record in self.store.read()]

    @property
    def ledger(self) -> Ledger:
        """The fold of the log. The server's own ledger may be ahead of it by the events being written."""
        return fold(self.events)

    async def until(self, happened: Callable[[], bool]) -> None:
        """Waits for an event after which ``happened``."""
        async with asyncio.timeout(20):
            while not happened():
                news = asyncio.Event()
                self.server.log.on_event(lambda _, news=news: news.set())  # type: ignore[misc]
                if not happened():
                    await news.wait()


@asynccontextmanager
async def serving(folder: Path, run: RunFile | None = None, *, stays: bool = False) -> AsyncIterator[Served]:
    with Store(store_url(folder), write=True) as store:
        state, story, events = open_run(store, run or run_in(folder))
        key = authority_key(authority_file(store.url, ""))
        server = Server(state, store, story, key)
        port = await server.bind("127.0.0.1", 0)
        server.addresses = (f"127.0.0.1:{port}",)
        made, secret = node_invitation(time.time(), 1000, "the test's nodes")
        first: list[ev.Event] = [made, *local_operator(state.ledger, server.addresses, server.pin)]
        server.begin_with(first)
        events += first
        await server.start()
        task = asyncio.create_task(server.run(events, stays=stays))
        try:
            invitation = Invitation(server.addresses, server.pin, made.invitation, secret)
            yield Served(server, store, port, task, invitation)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.close()  # a task that never began has not


async def train(served: Served, *nodes: FakeNode) -> int:
    """Until the run is over; its exit code. Raises AssertionError, which says how far it came."""
    async with AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node)
        await asyncio.wait([served.task], timeout=30)
        if not served.task.done():
            ended = {node.name: (node.refusal, node.error) for node in nodes if node.over.is_set()}
            last = [record.event for record in served.store.read()][-10:]
            raise AssertionError(
                f"not over after 30 s: {served.server.state.phase}; streams that ended: {ended}; {last}"
            )
        return served.task.result()

"""Every call over the wire is for certain roles, and refused to others by name: `service/port/gate.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.service.port import gate
from dtfm.coordinator.service.port.gate import MAY_CALL
from dtfm.protos import control_pb2 as wire, services
from dtfm.protos.connection import open_channel
from dtfm.protos.identity.access import Role
from dtfm.protos.identity.credentials import public_key, to_coordinator
from dtfm.protos.identity.enrolment import refusal_in
from dtfm.protos.identity.proof import CLOCKS_APART, Metadata, is_let_in, proof
from tests.coordinator.fake_node import enrolment
from tests.coordinator.script import hello
from tests.coordinator.serving import Served, serving
from tests.protos.members import key_of

Call = Callable[[grpc.aio.Channel, Metadata], Awaitable[Any]]


async def join(channel: grpc.aio.Channel, metadata: Metadata) -> None:
    stub = services.stub("Coordinator", channel)
    call = stub.Join(metadata=metadata)
    if is_let_in(await call.initial_metadata()):
        await call.write(hello("node"))
    if await call.read() is grpc.aio.EOF:
        raise AssertionError(f"it ended without an answer: {await call.code()}")
    call.cancel()


async def events(channel: grpc.aio.Channel, metadata: Metadata) -> None:
    stub = services.stub("Observer", channel)
    async for _ in stub.Events(wire.EventsRequest(), metadata=metadata):
        pass


def unary(method: str, request: object, service: str = "Observer") -> Call:
    async def call(channel: grpc.aio.Channel, metadata: Metadata) -> object:
        return await getattr(services.stub(service, channel), method)(request, metadata=metadata)

    return call


CALLS: dict[str, Call] = {
    "Join": join,
    "Put": unary("Put", wire.PutRequest(), "Disk"),
    "Look": unary("Look", wire.LookRequest(), "Disk"),
    "Get": unary("Get", wire.GetRequest(), "Disk"),
    "Events": events,
    "PlanNow": unary("PlanNow", wire.PlanNowRequest()),
    "Invite": unary("Invite", wire.InviteRequest(role="node", seconds=60, uses=1)),
    "Revoke": unary("Revoke", wire.RevokeRequest(what="nobody")),
    "Expel": unary("Expel", wire.ExpelRequest(node="nobody")),
    "Forgive": unary("Forgive", wire.ForgiveRequest(node="nobody")),
    "Steer": unary("Steer", wire.SteerRequest(wish=wire.SteerRequest.CONTINUE)),
}


async def refusal(served: Served, call: Call, metadata: Metadata) -> str:
    """The name of the reason why the call is refused; empty: its caller is not refused."""
    async with open_channel(served.address, to_coordinator(served.server.authority.certificate)) as channel:
        try:
            await asyncio.wait_for(call(channel, metadata), 20)
        except grpc.aio.AioRpcError as error:
            refused = refusal_in(error)
            if refused is None and error.code() in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.PERMISSION_DENIED,
            ):
                return ""  # the request itself cannot be granted
            return refused.reason if refused is not None else str(error)
    return ""


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """Each role's name is the role."""
    async with serving(tmp_path) as served:
        for role in Role:
            await served.enrolled(role.value, await served.invite(role), role)
        yield served


def shown(served: Served, name: str, key: str = "", behind: float = 0.0) -> Metadata:
    return proof(key_of(key or name), name, served.server.pin, time.time() - behind)


def test_every_method_is_in_the_table() -> None:
    services = wire.DESCRIPTOR.services_by_name.values()
    assert {method.name for service in services for method in service.methods} == {*MAY_CALL, "Enrol"}
    assert set(CALLS) == set(MAY_CALL)


async def test_each_role_may_make_its_own_calls_and_no_others(served: Served) -> None:
    for role in Role:
        refused = {name: await refusal(served, call, shown(served, role.value)) for name, call in CALLS.items()}
        assert refused == {name: "" if role in MAY_CALL[name] else "ROLE" for name in CALLS}


async def test_who_has_no_key_or_another_ones_may_call_nothing(served: Served) -> None:
    for call in CALLS.values():
        assert await refusal(served, call, ()) == "UNKNOWN_KEY"
        assert await refusal(served, call, (("authorization", "Bearer x"),)) == "UNKNOWN_KEY"
        assert await refusal(served, call, shown(served, "stranger")) == "UNKNOWN_KEY"
        assert await refusal(served, call, shown(served, "operator", key="viewer")) == "UNKNOWN_KEY"


async def test_a_wrong_clock_is_refused(served: Served) -> None:
    behind = CLOCKS_APART.total_seconds() + 60
    for call in CALLS.values():
        assert await refusal(served, call, shown(served, "operator", behind=behind)) == "WRONG_CLOCK"
        assert await refusal(served, call, shown(served, "operator", behind=-behind)) == "WRONG_CLOCK"


async def test_a_revoked_caller_may_call_nothing_and_hears_no_further_events(served: Served) -> None:
    async with served.channel() as channel:
        stub = services.stub("Observer", channel)
        following = stub.Events(wire.EventsRequest(follow=True), metadata=shown(served, "viewer"))
        for _ in served.events:
            await following.read()
        await served.server.ask(wire.RevokeRequest(what="viewer"), served.operator)
        with pytest.raises(grpc.aio.AioRpcError, match="REVOKED: the access of 'viewer' was revoked"):
            await asyncio.wait_for(following.read(), 10)
    assert await refusal(served, CALLS["Events"], shown(served, "viewer")) == "REVOKED"


async def test_a_revoked_node_is_hung_up_on_within_a_second(served: Served) -> None:
    async with served.node("a") as node:
        await served.until(lambda: "a" in served.ledger.members)
        began = time.monotonic()
        await served.server.ask(wire.RevokeRequest(what="a"), served.operator)
        await asyncio.wait_for(node.over.wait(), 10)
        assert time.monotonic() - began < 1
        assert node.refusal is not None
        assert node.refusal.reason == wire.REVOKED
        assert any(isinstance(event, ev.Revoked) for event in served.events)


async def test_a_key_is_enrolled_by_its_owner_alone(served: Served) -> None:
    """Or else a name could be bound to a key that its owner has for another."""
    request = enrolment("new", served.invitation)
    request.public_key = public_key(key_of("somebody else"))
    for metadata in (shown(served, "new"), shown(served, "viewer"), ()):
        async with served.channel() as channel:
            stub = services.stub("Coordinator", channel)
            with pytest.raises(grpc.aio.AioRpcError, match="MALFORMED"):
                await stub.Enrol(request, metadata=metadata)
    assert "new" not in served.ledger.access.names


async def test_who_calls_all_the_time_is_answered_later_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "CALLS_PER_SECOND", 0.01)
    monkeypatch.setattr(gate, "CALLS_AT_ONCE", 3.0)
    async with serving(tmp_path) as served, served.channel() as channel:
        flood = await served.enrolled("flood")
        for _ in range(3):
            await join(channel, flood)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(join(channel, flood), 0.2)
        await asyncio.wait_for(join(channel, await served.enrolled("other")), 10)

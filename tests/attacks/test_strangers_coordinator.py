"""Strangers at the coordinator's port cost little: each of these comes while a member is there, and harms nobody."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from dtfm.coordinator.service.port import caller as callers, front
from dtfm.coordinator.service.port.gate import Gate
from dtfm.coordinator.service.port.strangers import Limits
from dtfm.protos import control_pb2 as wire, services
from dtfm.protos.connection import read_address
from dtfm.protos.identity.credentials import COORDINATOR_NAME, public_key, to_coordinator
from dtfm.protos.identity.proof import proof
from tests.coordinator.fake_node import enrolment
from tests.coordinator.serving import Served, serving
from tests.protos.members import key_of

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PATIENCE = 10.0


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Small limits, so that the test need not open thousands."""
    limits = Limits(open_of_one=8, rate_of_one=1, burst_of_one=40, open=16, rate=1, burst=40)
    monkeypatch.setattr(Limits, "within", lambda _files: limits)
    return limits


@contextlib.asynccontextmanager
async def with_a_member(folder: Path) -> AsyncIterator[Served]:
    """A coordinator, and a node that must still be a member afterwards, over the connection that it had before."""
    async with serving(folder) as served, served.node("member") as node:
        await served.until(lambda: "member" in served.ledger.members)
        yield served
        assert not node.over.is_set()
        assert "member" in served.server.state.members.sessions


async def connect(served: Served) -> Connection:
    return await asyncio.open_connection(*read_address(served.address))


async def connected_and_cut_off(served: Served) -> bool:
    with contextlib.suppress(ConnectionError):
        return await is_cut_off(await connect(served))
    return True


async def is_cut_off(connection: Connection) -> bool:
    """Whether it ends within PATIENCE."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(connection[0].read(), PATIENCE) == b""
    return True


def greeting() -> bytes:
    """What TLS says first."""
    says = ssl.MemoryBIO()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), says, server_hostname=COORDINATOR_NAME)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return says.read()


async def test_silent_connections_are_few_and_end_soon(
    tmp_path: Path, few: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_a_member(tmp_path) as served:
        monkeypatch.setattr(callers, "HELLO_SECONDS", 0.3)
        many = asyncio.gather(*(connected_and_cut_off(served) for _ in range(30)))
        most = 0
        while not many.done():
            most = max(most, len(served.server._front._open))
            await asyncio.sleep(0.01)
        assert all(await many)
        assert most <= few.open_of_one + 2  # the member's are beside them


async def test_who_does_not_begin_with_tls_is_cut_off_and_does_not_reach_grpc(tmp_path: Path) -> None:
    async with with_a_member(tmp_path) as served:
        passed_on = next(served.server._front._numbers)
        caller = await connect(served)
        caller[1].write(b"GET / HTTP/1.1\r\n")
        async with asyncio.timeout(callers.HELLO_SECONDS / 2):
            assert await is_cut_off(caller)
        assert next(served.server._front._numbers) == passed_on + 1


async def test_a_slow_handshake_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with with_a_member(tmp_path) as served:
        monkeypatch.setattr(callers, "HELLO_SECONDS", 0.1)
        monkeypatch.setattr(callers, "STRANGER_SECONDS", 0.4)
        caller = await connect(served)

        async def drip() -> None:
            for byte in greeting()[:-1]:
                caller[1].write(bytes([byte]))
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        assert await is_cut_off(caller)
        dripping.cancel()


async def test_a_large_greeting_is_cut_off_before_anybody_parses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_a_member(tmp_path) as served:
        parsed: list[object] = []
        monkeypatch.setattr(Gate, "check_enrolment", lambda *arguments: parsed.append(arguments))
        credentials, named = to_coordinator(served.server.authority.certificate)
        key = key_of("stranger")
        large = wire.EnrolRequest(name="stranger", public_key=public_key(key), roles=["x" * (4 << 20)])
        options = (*named, ("grpc.max_send_message_length", -1), ("grpc.enable_retries", 0))
        async with grpc.aio.secure_channel(served.address, credentials, options=options) as channel:
            stub = services.stub("Coordinator", channel)
            call = stub.Enrol(large, metadata=proof(key, "stranger", served.server.pin))
            assert await asyncio.wait_for(call.code(), PATIENCE) == grpc.StatusCode.UNAVAILABLE
        assert not parsed


async def test_huge_metadata_are_cut_off(tmp_path: Path) -> None:
    async with with_a_member(tmp_path) as served:
        credentials, named = to_coordinator(served.server.authority.certificate)
        async with grpc.aio.secure_channel(served.address, credentials, options=named) as channel:
            stub = services.stub("Coordinator", channel)
            call = stub.Join(metadata=tuple((f"dtfm-{number}", "x" * 1000) for number in range(12)))
            code = await asyncio.wait_for(call.code(), PATIENCE)
            assert code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize("method", ["/dtfm.Coordinator/Join", "/dtfm.Coordinator/None"])
async def test_calls_without_a_token_are_few_on_each_connection(tmp_path: Path, method: str) -> None:
    async with with_a_member(tmp_path) as served:
        credentials, named = to_coordinator(served.server.authority.certificate)
        options = (*named, ("grpc.use_local_subchannel_pool", 1))
        before = next(served.server._front._numbers)
        async with grpc.aio.secure_channel(served.address, credentials, options=options) as channel:
            codes = {await channel.stream_stream(method)().code() for _ in range(3 * (front.MOST_STRANGE_CALLS + 1))}
        assert next(served.server._front._numbers) - before > 2  # it had to connect anew
    assert codes <= {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAVAILABLE,
    }


async def test_a_member_is_no_stranger_however_long_it_stays_and_whatever_it_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        callers, "STRANGER_SECONDS", callers.HELLO_SECONDS + 1.0
    )  # a busy machine may take seconds to let it in
    monkeypatch.setattr(callers, "MOST_STRANGE_BYTES", 4 << 10)
    async with serving(tmp_path) as served, served.node("member") as node:
        await served.until(lambda: "member" in served.ledger.members)
        before = served.server.state.members.sessions["member"].heard
        node.say(step_failed=wire.StepFailed(sentence="x" * (8 << 10)))
        await asyncio.sleep(callers.STRANGER_SECONDS)
        assert not node.over.is_set()
        assert served.server.state.members.sessions["member"].heard > before


@pytest.mark.parametrize("bound", ["of one key", "of all"])
async def test_members_have_a_bounded_number_of_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    async with serving(tmp_path) as served:
        at = served.server._front
        credentials, named = to_coordinator(served.server.authority.certificate)
        first = await served.enrolled("member")
        if bound == "of one key":  # the same machine's second name
            key = key_of("member")
            second = proof(key, "member-2", served.server.pin)
            request = enrolment("member-2", served.invitation)
            request.public_key = public_key(key)
        else:
            second = proof(key_of("other"), "other", served.server.pin)
            request = enrolment("other", served.invitation)
        async with served.channel() as channel:
            await services.stub("Coordinator", channel).Enrol(request, metadata=second)
        async with asyncio.timeout(PATIENCE):
            for caller in list(at._open):
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(caller.over.wait(), at._loop))
        if bound == "of one key":
            monkeypatch.setattr(front, "MOST_OF_A_KEY", 1)
        else:
            monkeypatch.setattr(at, "_most_of_members", 1)
        codes = []
        async with contextlib.AsyncExitStack() as stack:
            for metadata in (first, second):
                options = (*named, ("grpc.use_local_subchannel_pool", 1))
                channel = grpc.aio.secure_channel(served.address, credentials, options=options)
                await stack.enter_async_context(channel)
                stub = services.stub("Coordinator", channel)
                call = stub.Join(metadata=metadata)
                stack.callback(call.cancel)
                if await call.initial_metadata():
                    codes.append("let in")
                else:
                    codes.append(await call.details())
        assert codes[0] == "let in"
        assert codes[1].startswith("BUSY: this machine, or all together, have as many connections open as they may")

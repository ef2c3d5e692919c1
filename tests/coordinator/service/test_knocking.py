"""The coordinator dials who asks for it, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from ipaddress import ip_address

import pytest

from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.service import addresses, knocking
from dtfm.coordinator.service.knocking import knock
from dtfm.protos import control_pb2 as wire, knock as protos_knock

TOKEN = bytes(range(16))
SEEN = ip_address("127.0.0.1")


@pytest.fixture(autouse=True)
def another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callers of these tests are on loopback, and count as others."""
    monkeypatch.setattr(knocking, "is_own", lambda _: False)


async def serve(answer: bytes) -> tuple[asyncio.Server, str]:
    async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_who_sends_the_callers_token_is_the_caller() -> None:
    caller, address = await serve(TOKEN)
    other, wrong = await serve(b"SSH-2.0-OpenSSH_9.2 and more")
    short, cut = await serve(b"x")
    async with caller, other, short:
        reply = await knock("a", [address, wrong, cut], TOKEN, SEEN)
    assert [each.problem for each in reply.outcomes] == ["", *["another program answers there"] * 2]
    assert reply.seen == "127.0.0.1"


async def test_nobody_answers_within_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protos_knock, "KNOCK_SECONDS", 0.05)
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(0), "127.0.0.1", 0)
    async with silent:
        reply = await knock("a", [f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"], TOKEN, SEEN)
    assert reply.outcomes[0].problem == "not reached"


async def test_it_does_not_tell_why_nobody_is_reached() -> None:
    """Whether a port is closed or filtered is what a port scan tells."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        reply = await knock("a", [f"127.0.0.1:{closed.getsockname()[1]}"], TOKEN, SEEN)
    assert reply.outcomes[0].problem == "not reached"


async def test_the_coordinators_own_machine_is_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a proxy every caller is seen there."""
    monkeypatch.setattr(knocking, "is_own", addresses.is_own)
    monkeypatch.setattr(addresses, "own_hosts", lambda: ["198.51.100.7", "fe80::1%eth0"])

    async def dial(*_: object) -> str:
        raise AssertionError("dialled")

    monkeypatch.setattr(knocking, "_dial", dial)
    for own in ("127.0.0.1", "::1", "198.51.100.7"):
        text = f"[{own}]:7401" if ":" in own else f"{own}:7401"
        (outcome,) = (await knock("a", [text], TOKEN, ip_address(own))).outcomes
        assert (outcome.elsewhere, outcome.problem) == (True, "")


async def test_others_than_the_caller_are_not_dialled() -> None:
    server, address = await serve(TOKEN)
    async with server:
        for seen in (ip_address("192.0.2.1"), None):
            (outcome,) = (await knock("a", [address], TOKEN, seen)).outcomes
            assert (outcome.elsewhere, outcome.problem) == (True, "")


@pytest.mark.parametrize(
    ("candidates", "token"),
    [
        (["127.0.0.1:7401"] * 9, TOKEN),
        (["127.0.0.1:7401", "127.0.0.1:22"], TOKEN),
        (["127.0.0.1:7401", "localhost:7401"], TOKEN),
        (["127.0.0.1:7401"], TOKEN[1:]),
    ],
    ids=["too many", "a port of others", "a name", "a short token"],
)
async def test_a_bad_request_is_refused_before_anybody_is_dialled(
    candidates: list[str], token: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled = []

    async def dial(host: str, port: int, _: bytes) -> str:
        dialled.append((host, port))
        return ""

    monkeypatch.setattr(knocking, "_dial", dial)
    with pytest.raises(Refused):
        await knock("a", candidates, token, SEEN)
    await asyncio.sleep(0)
    assert not dialled


class Silent:
    """Takes connections at ``address``, and says nothing."""

    def __init__(self) -> None:
        self.taken: asyncio.Queue[asyncio.StreamReader] = asyncio.Queue()

    async def __aenter__(self) -> Silent:
        self._server = await asyncio.start_server(lambda r, _: self.taken.put_nowait(r), "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def met(self) -> asyncio.StreamReader:
        return await asyncio.wait_for(self.taken.get(), 10)


async def hung_up(*calls: asyncio.Task[wire.KnockReply]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)


async def test_an_address_that_is_named_twice_is_dialled_once() -> None:
    async with Silent() as silent:
        mapped = silent.address.replace("127.0.0.1", "[::ffff:127.0.0.1]")
        call = asyncio.create_task(knock("a", [silent.address, silent.address, mapped], TOKEN, SEEN))
        await silent.met()
        await hung_up(call)
        assert silent.taken.empty()


async def test_a_name_is_dialled_for_one_call_at_a_time_and_who_hangs_up_ends_it() -> None:
    async with Silent() as silent:
        first = asyncio.create_task(knock("a", [silent.address], TOKEN, SEEN))
        reader = await silent.met()
        with pytest.raises(Refused, match="a is being dialled already") as refused:
            await knock("a", [silent.address], TOKEN, SEEN)
        assert refused.value.reason == wire.BUSY
        await hung_up(first)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 2) == b""
        again = asyncio.create_task(knock("a", [silent.address], TOKEN, SEEN))
        await silent.met()
        await hung_up(again)


async def test_who_finds_all_places_taken_is_refused_and_does_not_wait() -> None:
    async with Silent() as silent:
        names = [f"n{number}" for number in range(knocking.MOST_AT_ONCE)]
        calls = [asyncio.create_task(knock(name, [silent.address], TOKEN, SEEN)) for name in names]
        for _ in calls:
            await silent.met()
        with pytest.raises(Refused, match="ask again in some seconds") as refused:
            await knock("one more", [], TOKEN, SEEN)
        assert refused.value.reason == wire.BUSY
        await hung_up(*calls)
    assert not (await knock("one more", [], TOKEN, SEEN)).outcomes

"""The coordinator dials who asks for it, and nobody else."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address

import pytest

from dtfm.coordinator.core.validation import Refused
from dtfm.coordinator.service import knocking
from dtfm.coordinator.service.knocking import knock

TOKEN = bytes(range(16))
SEEN = ip_address("127.0.0.1")


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
        reply = await knock([address, wrong, cut], TOKEN, SEEN)
    assert [each.problem for each in reply.outcomes] == ["", *["another program answers there"] * 2]
    assert reply.seen == "127.0.0.1"


async def test_nobody_answers_within_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knocking, "KNOCK_SECONDS", 0.05)
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(0), "127.0.0.1", 0)
    async with silent:
        reply = await knock([f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"], TOKEN, SEEN)
    assert reply.outcomes[0].problem == "no answer within 0 s"


async def test_others_than_the_caller_are_not_dialled() -> None:
    server, address = await serve(TOKEN)
    async with server:
        for seen in (ip_address("192.0.2.1"), None):
            (outcome,) = (await knock([address], TOKEN, seen)).outcomes
            assert (outcome.elsewhere, outcome.problem) == (True, "")


@pytest.mark.parametrize(
    ("candidates", "token"),
    [(["127.0.0.1:7401"] * 9, TOKEN), (["127.0.0.1:22"], TOKEN), (["localhost:7401"], TOKEN), ([], TOKEN[1:])],
    ids=["too many", "a port of others", "a name", "a short token"],
)
async def test_a_bad_request_is_refused(candidates: list[str], token: bytes) -> None:
    with pytest.raises(Refused):
        await knock(candidates, token, SEEN)

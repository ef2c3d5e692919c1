"""Whoever connects to the page gets one of few places, and loses it by saying nothing: `web/callers.py`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from dtfm.coordinator.service.port.strangers import Limits
from dtfm.coordinator.web import app, callers, serving
from dtfm.coordinator.web.callers import limits_within
from dtfm.protos.identity.access import Role
from tests.coordinator.web.serving_page import asked, connected, page_of
from tests.coordinator.web.stored_run import stored_run
from tests.coordinator.web.test_viewers import cookie_by, heard, page_for_viewers

HALF = b"GET / HTTP/1.1\r\nHost: "
WHOLE = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def is_cut_off(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), 20) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("before", [b"", WHOLE], ids=["first", "second"])
async def test_half_a_request_has_a_deadline_however_it_drips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(callers, "HEAD_SECONDS", 0.4)
    async with page_of(stored_run()[:1], tmp_path) as served:
        reader, writer = await connected(served.link)
        if before:
            writer.write(before)
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")

        async def drip() -> None:
            writer.write(HALF)
            while True:
                writer.write(b"1")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        assert await is_cut_off(reader)
        dripping.cancel()
        writer.close()


async def test_an_answer_that_nobody_asks_to_the_end_has_a_deadline_and_a_stream_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(app, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(app, "QUIET_SECONDS", 0.1)
    async with page_for_viewers(tmp_path) as (served, page):
        kept = await cookie_by((await served.invite(Role.OPERATOR)).page)
        stream, streaming = await heard(page, kept)
        reader, writer = await connected(page)
        head = f"POST /ask/steer HTTP/1.1\r\nHost: x\r\nCookie: {kept}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert await is_cut_off(reader)
        for _ in range(2):
            await asyncio.wait_for(stream.readuntil(b"data: "), 10)
        for each in (writer, streaming):
            each.close()


async def test_connections_to_a_page_on_loopback_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(open_of_one=4, open=4, rate=1000.0, rate_of_one=1000.0)
    monkeypatch.setattr(serving, "limits_within", lambda _files, **_: limits)
    async with page_of(stored_run()[:1], tmp_path) as served:
        silent = []
        for _ in range(40):
            with suppress(ConnectionError):
                silent.append(await connected(served.link))
        ends = {asyncio.create_task(is_cut_off(reader)): writer for reader, writer in silent}
        left = set(ends)
        while len(left) > 4:
            left = (await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED))[1]
        assert len(left) == 4
        for writer in ends.values():
            writer.close()
        await asyncio.wait(ends)
        assert (await asked(served.link, "/healthz"))[0] == 200


async def test_one_link_takes_no_more_than_its_streams_and_operators_have_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MOST_OF_A_LINK", 2)
    monkeypatch.setattr(app, "MOST_VIEWERS", 3)
    async with page_for_viewers(tmp_path) as (served, page):
        one, other = [await cookie_by((await served.invite(Role.VIEWER)).page) for _ in range(2)]
        operator = await cookie_by((await served.invite(Role.OPERATOR)).page)
        open_ = [(await heard(page, one))[1] for _ in range(2)]
        assert (await asked(page, "/news", cookie=one))[0] == 503
        open_.append((await heard(page, other))[1])
        assert (await asked(page, "/news", cookie=other))[0] == 503, "three pages are open"
        open_.append((await heard(page, operator))[1])
        for writer in open_:
            writer.close()


async def test_one_link_takes_no_more_than_its_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "MOST_OF_A_LINK", 2)
    async with page_for_viewers(tmp_path) as (served, page):
        one, other = [await cookie_by((await served.invite(Role.VIEWER)).page) for _ in range(2)]
        open_ = [(await heard(page, one))[1] for _ in range(2)]
        status, _, said = await asked(page, "/state", cookie=one)
        assert (status, b"as many connections are open as there may be" in said) == (503, True)
        assert (await asked(page, "/state", cookie=other))[0] == 200
        for writer in open_:
            writer.close()


@pytest.mark.parametrize("files", [1024, 4096, 1 << 20])
def test_the_page_and_the_metrics_leave_most_files_to_members(files: int) -> None:
    page, metrics = limits_within(files, from_anywhere=False), limits_within(files, from_anywhere=True)
    gates = Limits.within(files)
    taken = 2 * page.open + page.members + 2 * metrics.open
    assert page.open >= 16
    assert taken <= files / 6
    assert taken + 3 * (2 * gates.open + gates.members) <= 0.95 * files

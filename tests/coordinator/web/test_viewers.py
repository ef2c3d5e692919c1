"""Readers of the page from elsewhere: a viewer's link admits them, until its end."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http.cookies import SimpleCookie
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.service.port.strangers import Limits
from dtfm.coordinator.web import app, callers, door, serving
from dtfm.coordinator.web.app import make_app
from dtfm.coordinator.web.serving import bind_page, link_to, page_served, read_page_url, url_elsewhere
from dtfm.protos import control_pb2 as wire
from dtfm.protos.identity.access import Role
from dtfm.protos.identity.invitation import read_invitation
from tests.coordinator.serving import Served, serving as serving_run
from tests.coordinator.web.serving_page import asked, connected

END = b"0\r\n\r\n"
"""Of an answer that is whole."""
PATHS = ("/", "/page.js", "/state", "/state?at=1", "/metrics", "/news")


@asynccontextmanager
async def page_for_viewers(
    folder: Path, *, secure: bool = False, from_anywhere: bool = False
) -> AsyncIterator[tuple[Served, str]]:
    """A coordinator with a page that asks for a link, and where that is."""
    async with serving_run(folder) as served:
        page = bind_page("127.0.0.1:0")
        served.server.page = link_to(page)
        server = served.server
        asks = make_app(server.follower, lambda: server.ledger, server.ask, by_link=True, secure=secure)
        async with page_served(page, asks, from_anywhere=from_anywhere):
            yield served, served.server.page


def behind(link: str) -> str:
    """What a browser asks for."""
    return f"/?{urlsplit(link).query}"


async def cookie_by(link: str) -> str:
    headers = (await asked(link, behind(link)))[1]
    return headers["set-cookie"].partition(";")[0]


async def heard(link: str, cookie: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """An open stream of the page's events. Its first event has come."""
    reader, writer = await connected(link)
    writer.write(f"GET /news HTTP/1.1\r\nHost: x\r\nCookie: {cookie}\r\n\r\n".encode())
    await asyncio.wait_for(reader.readuntil(b"data: "), 10)
    return reader, writer


async def test_a_link_opens_the_page_and_all_that_it_shows_and_nothing_opens_it_without(tmp_path: Path) -> None:
    async with page_for_viewers(tmp_path) as (served, page), served.node("a"):
        await served.until(lambda: any(isinstance(event, ev.NodeReady) for event in served.events))
        for path in PATHS:
            status, _, content = await asked(page, path)
            assert (status, b"invite --role viewer" in content) == (403, True), path

        status, _, content = await asked(page, "/healthz")
        assert (status, json.loads(content)) == (200, {"healthy": True, "state": "waiting"}), (
            "no reason: it names nodes"
        )

        reply = await served.invite(Role.VIEWER)
        status, headers, content = await asked(page, behind(reply.page))
        cookie = SimpleCookie(headers["set-cookie"])
        (morsel,) = cookie.values()
        kept = f"{morsel.key}={morsel.value}"
        assert (status, morsel["httponly"], morsel["samesite"], morsel["path"]) == (200, True, "strict", "/")
        assert 3590 < int(morsel["max-age"]) <= 3600, "the cookie ends with the link"
        secret = read_invitation(reply.invitation).secret.hex()
        assert secret in morsel.value
        assert secret not in str(content)
        assert b'content="0; url=./"' in content, "the browser goes on to an address without the secret"

        for path in PATHS[:-1]:
            status, headers, content = await asked(page, path, cookie=kept)
            assert status == 200, path
            shown = gzip.decompress(content) if "content-encoding" in headers else content
            assert b"10.0.0.1" not in shown, "where a is"
            assert secret.encode() not in shown
        assert "10.0.0.1" in str(served.events)
        (await heard(page, kept))[1].close()


async def test_a_link_opens_the_page_as_often_as_one_likes_also_when_somebody_watches_by_its_invitation(
    tmp_path: Path,
) -> None:
    async with page_for_viewers(tmp_path) as (served, page):
        reply = await served.invite(Role.VIEWER)
        await served.enrolled("eve", reply, Role.VIEWER)
        kept = await cookie_by(reply.page)
        assert (await asked(page, "/state", cookie=kept))[0] == 200
        await served.server.ask(wire.RevokeRequest(what="eve"), served.operator)
        assert (await asked(page, "/state", cookie=kept))[0] == 403, "with a name ends the link that it came by"


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Puts the door's clock forward."""

    def put(seconds: float) -> None:
        monkeypatch.setattr(door, "time", SimpleNamespace(time=lambda: time.time() + seconds))

    return put


async def test_who_has_no_good_link_reads_why_and_what_to_do(tmp_path: Path, later: Callable[[float], None]) -> None:
    async with page_for_viewers(tmp_path) as (served, page):
        revoked, short, node = [
            await served.invite(role, seconds)
            for role, seconds in ((Role.VIEWER, 3600), (Role.VIEWER, 60), (Role.NODE, 3600))
        ]
        operator = await served.invite(Role.OPERATOR)
        name = (await cookie_by(short.page)).partition("=")[0]
        await served.server.ask(wire.RevokeRequest(what=revoked.id), served.operator)
        later(61)
        for link, reason in (
            (revoked.page, f"invitation {revoked.id} was revoked"),
            (short.page, f"invitation {short.id} was good until "),
            (revoked.page[:-1], "it is not whole"),
            (revoked.page.replace(revoked.id, "0" * 12), "this coordinator knows no such invitation"),
            (f"{revoked.page[:-4]}0000", "this coordinator knows no such invitation"),
            (_link(node), f"invitation {node.id} is for a node"),
            ("/?link=<b>", "it is not whole"),
        ):
            for path, cookie in ((behind(link), ""), ("/state", f"{name}={urlsplit(link).query.partition('=')[2]}")):
                status, headers, content = await asked(page, path, cookie=cookie)
                assert (status, reason in content.decode(), "set-cookie" in headers) == (403, True, False), reason
                assert b"dtfm-coordinator invite --role viewer" in content
        assert (await asked(page, behind(operator.page)))[0] == 200


def _link(reply: wire.InviteReply) -> str:
    """The link of an invitation that was not printed."""
    assert reply.page == ""
    invitation = read_invitation(reply.invitation)
    return f"http://x/?link={invitation.id}{invitation.secret.hex()}"


async def test_open_event_streams_end_with_their_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: Callable[[float], None]
) -> None:
    monkeypatch.setattr(app, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(app, "QUIET_SECONDS", 600.0)
    async with page_for_viewers(tmp_path) as (served, page), asyncio.timeout(30):
        mine, other, short = [await served.invite(Role.VIEWER, seconds) for seconds in (3600, 3600, 60)]
        streams = [await heard(page, await cookie_by(each.page)) for each in (mine, other)]
        await served.server.ask(wire.RevokeRequest(what=mine.id), served.operator)
        await streams[0][0].readuntil(END)
        await streams[1][0].readuntil(b"data: ")
        monkeypatch.setattr(app, "QUIET_SECONDS", 0.1)
        streams.append(await heard(page, await cookie_by(short.page)))
        later(61)
        await streams[2][0].readuntil(END)
        for _, writer in streams:
            writer.close()


async def test_a_page_behind_https_has_a_cookie_for_https_alone(tmp_path: Path) -> None:
    async with page_for_viewers(tmp_path, secure=True) as (served, page):
        link = (await served.invite(Role.VIEWER)).page
        assert "; secure" in (await asked(page, behind(link)))[1]["set-cookie"]
    async with page_for_viewers(tmp_path) as (served, page):
        link = (await served.invite(Role.VIEWER)).page
        assert "; secure" not in (await asked(page, behind(link)))[1]["set-cookie"]


async def test_strangers_try_few_links_and_hold_few_connections_and_viewers_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "limits_within", lambda _files, **_: Limits(rate_of_one=0.001, burst_of_one=8.0))
    monkeypatch.setattr(callers, "STRANGER_SECONDS", 1.0)
    monkeypatch.setattr(app, "PAUSE_SECONDS", 0.01)
    async with page_for_viewers(tmp_path, from_anywhere=True) as (served, page), asyncio.timeout(60):
        link = await served.invite(Role.VIEWER)
        kept = await cookie_by(link.page)
        stream, streaming = await heard(page, kept)
        for _ in range(20):
            assert (await asked(page, "/state", cookie=kept))[0] == 200
        reader, silent = await connected(page)
        assert await reader.read() == b"", "it says nothing, and is closed"
        silent.close()
        tried = 0
        while answers := await _answers(page, 3):
            assert answers == 1, "each needs a connection of its own"
            tried += 1
        assert 2 <= tried <= 8
        await served.server.ask(wire.RevokeRequest(what=link.id), served.operator)
        await stream.readuntil(END)  # a viewer's connection lasts longer than a stranger's
        streaming.close()


async def _answers(page: str, requests: int) -> int:
    """The number of answers to this many ``requests`` with a wrong link over one connection."""
    try:
        reader, writer = await connected(page)
    except ConnectionError:
        return 0
    writer.write(requests * f"GET /?link={'0' * 76} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    try:
        return (await reader.read()).count(b"HTTP/1.1 403 ")
    except ConnectionError:
        return 0
    finally:
        writer.close()


def test_a_link_leads_where_others_reach_the_page() -> None:
    with bind_page("127.0.0.1:0") as page:
        assert url_elsewhere(page, "", ["one.example.org"]) == "", "it is on this machine alone"
        assert url_elsewhere(page, "https://run.example.org/", []) == "https://run.example.org/"
    with bind_page("0.0.0.0:0") as page:
        port = page.getsockname()[1]
        assert url_elsewhere(page, "", ["one.example.org", "two.example.org"]) == f"http://one.example.org:{port}/"
        assert url_elsewhere(page, "", []).endswith(f":{port}/")
        assert url_elsewhere(page, "", []) != f"http://0.0.0.0:{port}/"
    assert [read_page_url(text) for text in ("", "https://a.example", "http://a.example/run/")] == [
        "",
        "https://a.example/",
        "http://a.example/run/",
    ]
    for wrong in ("a.example", "ftp://a.example/", "https:///", "https://a.example/?x=1"):
        with pytest.raises(ValueError, match=r"--page-url .* give it like https://run\.example\.org/"):
            read_page_url(wrong)

"""Operators direct the run by the page; nobody else does, and no other site in their name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.async_api import expect

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.web.app import make_app
from dtfm.coordinator.web.serving import bind_page, link_to, page_served
from dtfm.protos import control_pb2 as wire
from dtfm.protos.identity.access import Role
from tests.coordinator.serving import serving
from tests.coordinator.web.serving_page import asked, connected
from tests.coordinator.web.test_browser import PICTURES, browser_at
from tests.coordinator.web.test_viewers import cookie_by, page_for_viewers

PAUSE = '{"wish": "PAUSE"}'


async def posted(
    link: str, what: str, body: str, cookie: str = "", kind: str = "application/json", more: Sequence[str] = ()
) -> tuple[int, str]:
    """The answer's status and content. ``more``: headers."""
    reader, writer = await connected(link)
    lines = [
        f"POST /ask/{what} HTTP/1.1",
        f"Host: {urlsplit(link).netloc}",
        f"Content-Type: {kind}",
        f"Cookie: {cookie}",
    ]
    writer.write("\r\n".join([*lines, *more, f"Content-Length: {len(body)}", "Connection: close", "", body]).encode())
    head, _, content = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), content.decode()


async def test_an_operators_link_directs_until_it_is_revoked_and_a_viewers_only_shows(tmp_path: Path) -> None:
    async with page_for_viewers(tmp_path) as (served, page):
        operator, viewer = [await served.invite(role) for role in (Role.OPERATOR, Role.VIEWER)]
        directs, looks = [await cookie_by(each.page) for each in (operator, viewer)]
        for cookie, may in ((directs, True), (looks, False)):
            assert json.loads((await asked(page, "/ask/steer", cookie=cookie))[2]) == {"directs": may}
        status, said = await posted(page, "steer", PAUSE, looks)
        assert (status, "invite --role operator" in said, served.ledger.hold) == (403, True, None)
        assert (await posted(page, "steer", PAUSE))[0] == 403

        status, said = await posted(page, "steer", PAUSE, directs)
        assert (status, "pause" in json.loads(said)["sentence"]) == (200, True)
        assert served.ledger.hold is not None
        assert served.ledger.hold.by == operator.id
        invited = json.loads(
            (await posted(page, "invite", '{"role": "operator", "seconds": 60, "uses": 1}', directs))[1]
        )

        await served.server.ask(wire.RevokeRequest(what=operator.id), served.operator)
        assert (await posted(page, "steer", '{"wish": "CONTINUE"}', directs))[0] == 403
        assert (await posted(page, "steer", PAUSE, await cookie_by(viewer.page)))[0] == 403
        status, _, content = await asked(page, f"/?{urlsplit(invited['page']).query}")
        assert (status, b"was revoked" in content) == (403, True), "access through a link ends with the link"
        assert served.ledger.hold is not None


@pytest.mark.parametrize(
    ("what", "body", "kind", "status", "reason"),
    [
        ("steer", PAUSE, "text/plain", 400, "it must be application/json"),
        ("steer", PAUSE, "application/x-www-form-urlencoded", 400, "it must be application/json"),
        ("enrol", "{}", "application/json", 400, "for one of plan-now, invite"),
        ("steer", '{"wish": "DANCE"}', "application/json", 400, "DANCE"),
        ("steer", "[1", "application/json", 400, ""),
        ("steer", '{"key": ' * 400, "application/json", 400, ""),
        ("steer", "x" * 5000, "application/json", 413, "longer than 4096"),
        ("expel", '{"node": "nobody"}', "application/json", 400, "there is no node 'nobody'"),
    ],
)
async def test_what_no_page_of_ours_sends_changes_nothing(
    tmp_path: Path, what: str, body: str, kind: str, status: int, reason: str
) -> None:
    async with page_for_viewers(tmp_path) as (served, page):
        cookie = await cookie_by((await served.invite(Role.OPERATOR)).page)
        before = len(served.events)
        answered, said = await posted(page, what, body, cookie, kind)
        assert (answered, reason in said, len(served.events)) == (status, True, before), said


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Origin: https://evil.example", 403),
        ("Origin: null", 403),
        ("Origin: http://127.0.0.1:1", 403),
        ("Sec-Fetch-Site: cross-site", 403),
        ("Sec-Fetch-Site: same-site", 403),
        ("Origin: http://{here}", 200),
        ("Origin: https://{here}", 200),
        ("Sec-Fetch-Site: same-origin", 200),
    ],
)
async def test_what_another_sites_page_sends_changes_nothing(tmp_path: Path, header: str, status: int) -> None:
    """Also where a browser has sent the cookie with it: another page of this machine is of the same site."""
    async with page_for_viewers(tmp_path) as (served, page):
        cookie = await cookie_by((await served.invite(Role.OPERATOR)).page)
        named = header.format(here=urlsplit(page).netloc)
        answered, said = await posted(page, "steer", PAUSE, cookie, more=[named])
        assert answered == status, said
        assert (served.ledger.hold is None) == (status == 403)


async def test_on_this_machine_the_page_opens_without_a_word_and_directs_by_a_link(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.node("attic"):
        socket, problems = bind_page("127.0.0.1:0"), list[str]()
        server = served.server
        server.page = link_to(socket)
        app = make_app(server.follower, lambda: server.ledger, server.ask)
        async with page_served(socket, app), browser_at(server.page, problems) as page:
            await expect(page.locator("#figures")).to_contain_text("node")
            await expect(page.locator("#direct")).to_be_empty()
            await page.goto((await served.invite(Role.OPERATOR)).page)
            await page.get_by_role("button", name="Pause").click()
            await expect(page.locator("#state")).to_contain_text("paused")
            await page.get_by_role("button", name="Continue").click()
            await expect(page.locator("#answer")).to_have_text("the run goes on")
            await page.get_by_role("button", name="Invite a node").click()
            await expect(page.locator("#answer")).to_contain_text("dtfm-node join dtfm1.")
            await page.get_by_role("button", name="Plan now").click()
            await expect(page.locator("#answer")).not_to_contain_text("dtfm-node join")
            await page.screenshot(path=PICTURES / "operator.png", full_page=True)
            await page.get_by_role("row", name="attic").get_by_role("button").click()
            await page.get_by_label("Why").fill("<b>it is too warm</b>")
            await page.get_by_role("button", name="Expel").click()
            await expect(page.locator("#answer")).to_contain_text("attic is quarantined")
            await expect(page.get_by_role("row", name="attic")).to_contain_text("quarantined")
            await page.get_by_role("row", name="attic").get_by_role("button").click()
            await expect(page.locator("#detail")).to_contain_text("expelled it: <b>it is too warm</b>")
            await page.get_by_role("button", name="Forgive").click()
            await expect(page.locator("#answer")).to_contain_text("attic may come back")
            await page.get_by_role("button", name="Stop…").click()
            await page.get_by_role("button", name="Close").click()
            assert served.ledger.hold is None
            await page.get_by_role("button", name="Stop…").click()
            await page.get_by_role("button", name="Stop the run").click()
            await served.until(lambda: any(isinstance(event, ev.RunStopped) for event in served.events))
        assert not problems

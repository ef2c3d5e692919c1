"""What a person sees of a stored run in Chromium."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, async_playwright, expect

from dtfm.protos import control_pb2 as wire
from dtfm.protos.identity.access import Role
from tests.coordinator.web.serving_page import page_of
from tests.coordinator.web.stored_run import MARKUP, stored_run
from tests.coordinator.web.test_viewers import page_for_viewers

PICTURES = Path("build/page")
"""Screenshots, for people to look at."""


@asynccontextmanager
async def browser_at(link: str, problems: list[str]) -> AsyncIterator[Page]:
    """A page of 1280 by 900 pixels. ``problems`` gets what the browser complains about."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(30_000)
        expect.set_options(timeout=30_000)  # this machine may be busy
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
        await page.goto(link)
        yield page
        await browser.close()


async def test_a_person_sees_the_run_its_plan_its_past_and_who_takes_part(tmp_path: Path) -> None:
    records, problems = stored_run(), list[str]()
    async with page_of(records, tmp_path, len(records) - 10) as served, browser_at(served.link, problems) as page:

        async def shows(name: str, *texts: str) -> None:
            for text in texts:
                await expect(page.locator(f"#{name}")).to_contain_text(text)

        # The run, live.
        await expect(page).to_have_title("170 of 240: stories-1b")
        await shows("state", "training")
        served.happen()
        await shows("figures", "180 of 240", "3.83", "node-hours, 4 nodes now", "Cost", "1.90 an hour now")
        await expect(page.get_by_label("Loss. loss: from 10.3 at step 1 ")).to_be_visible()
        await page.get_by_role("button", name="over time").click()
        await expect(page.get_by_label("Loss. loss: from 10.3 at 2 min")).to_be_visible()
        # The plan.
        await shows(
            "plan-view", "Stage 2", "layers 17–23", "runpod-2", "32 micro-batches", "no plan can take less", "6.6 s"
        )
        await shows("plan-view", "attic is quarantined: runpod-2 computes the last stage alone")
        await page.get_by_text("Flows, link by link").click()
        await expect(page.locator("#plan-view tbody tr").first).to_contain_text("activations i8b256")
        # Its past: a lane for each node, and the plans, of which one says what it changed.
        await expect(page.locator(".lanes .name")).to_contain_text(
            ["lab-a100", "lab-3090", "home-4090", "vast-7", "attic", "runpod-2"]
        )
        await expect(page.locator(".lanes title", has_text="left: no heartbeat for 30 s")).to_have_count(2)
        await page.screenshot(path=PICTURES / "wide.png", full_page=True)
        await page.get_by_role("button", name="Plan 2").focus()
        await page.keyboard.press("Enter")
        await shows("detail", "Before", "After", "vast-7 left", "lost; 11 to home-4090")
        await expect(page.locator(".sides section").first).to_contain_text("vast-711 micro-batches")
        await page.screenshot(path=PICTURES / "plans.png")
        await page.keyboard.press("Escape")
        await expect(page.locator("#detail")).to_be_hidden()
        # The page as it was, by the same renderer.
        lost = next(each.sequence for each in records if each.event.event == "node_left")
        await page.get_by_label("Replay", exact=True).fill(str(lost - 1))
        await shows("state", f"replay: event {lost - 1}")
        await shows("figures", "60 of 240", "5 nodes now")
        await shows("plan-view", "vast-7", "attic", "is ready; this plan does without it")
        await expect(page.locator(".plans li")).to_have_count(1)
        await page.get_by_role("button", name="Play").click()
        await expect(page.locator("#figures")).to_contain_text(re.compile(r"Step[789]\d of 240"))
        await page.get_by_role("button", name="Pause").click()
        await page.get_by_label("Replay", exact=True).fill(str(lost - 1))
        await shows("figures", "60 of 240")
        # Members, whatever they say.
        await page.get_by_role("row", name="attic").get_by_role("button").click()
        await shows("detail", MARKUP, "12 GiB", "public from 3, not at all from 1")
        await page.get_by_role("button", name="Close").click()
        await page.get_by_role("row", name="vast-7").get_by_role("button").click()
        await shows("detail", "a-device-with-a-long-name", "…")
        await page.keyboard.press("Escape")
        assert await page.locator("img").count() == 0
        await page.get_by_role("button", name="Live").click()
        await shows("figures", "180 of 240")
        await shows("given-view", "home-4090", "35.4%", "vast-7 has left")
        # Links.
        cell = page.locator(".map tbody tr").first.locator("td").nth(1)
        await expect(cell).to_have_text("9,600")
        await page.get_by_role("button", name="latency").click()
        await expect(cell).to_have_text("0.2")
        await shows("events-view", "attic is quarantined: AUDIT: lab-a100 got other activations")
        # For everybody, everywhere.
        for scheme in ("dark", "light"):
            await page.emulate_media(color_scheme=scheme)
            found = await Axe().run(page)
            serious = [f for f in found.response["violations"] if f["impact"] in ("serious", "critical")]
            assert not serious, found.generate_report()
        await page.set_viewport_size({"width": 390, "height": 844})
        await page.wait_for_function("document.documentElement.scrollWidth === 390")
        await page.screenshot(path=PICTURES / "phone.png", full_page=True)
    assert not problems


async def test_a_link_on_another_site_opens_the_page_and_stays_in_no_address_until_it_is_revoked(
    tmp_path: Path,
) -> None:
    async with page_for_viewers(tmp_path) as (served, address), browser_at(address, []) as page:
        await expect(page.locator("main")).to_contain_text("this browser has shown none")
        link, elsewhere = await served.invite(Role.VIEWER), "http://chat.example/"
        said = f'<a href="{link.page}">Look!</a>'
        await page.route(elsewhere, lambda route: route.fulfill(body=said, content_type="text/html"))
        await page.goto(elsewhere)
        await page.get_by_text("Look!").click()
        await expect(page.locator("#figures")).to_contain_text("0 nodes now")
        assert page.url == address
        await page.go_back()
        assert page.url == elsewhere
        await page.goto(address)
        await expect(page.locator("#figures")).to_contain_text("0 nodes now")
        await served.server.ask(wire.RevokeRequest(what=link.id), served.operator)
        await expect(page.locator("main")).to_contain_text(f"invitation {link.id} was revoked")
        await expect(page.locator("main")).to_contain_text("dtfm-coordinator invite --role viewer")

"""What a person sees of a stored run in Chromium."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, async_playwright, expect

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.store import Record
from dtfm.protos import control_pb2 as wire
from dtfm.protos.identity.access import Role
from tests.coordinator.web.serving_page import page_of
from tests.coordinator.web.stored_run import MARKUP, early_run, finished_run, idle_run, rising_run, slow_run, stored_run
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


@pytest.mark.soak
async def test_a_person_sees_the_run_its_plan_its_past_and_who_takes_part(tmp_path: Path) -> None:
    records, problems = stored_run(), list[str]()
    async with page_of(records, tmp_path, len(records) - 10) as served, browser_at(served.link, problems) as page:

        async def shows(name: str, *texts: str) -> None:
            for text in texts:
                await expect(page.locator(f"#{name}")).to_contain_text(text)

        # The run, live.
        await expect(page).to_have_title(re.compile("170 of 240: .* · stories-1b"))
        await shows("state", "training")
        served.happen()
        await shows("verdict", "training, as planned, since")
        await shows("figures", "180 of 240", "3.83", "node-hours, 4 nodes now", "Ends")
        await shows("figures", "Cost so far", "1.90 EUR an hour", "EUR in all", "1 node has no price")
        await expect(page.get_by_label("Loss. loss: from 10.3 at step 1 ")).to_be_visible()
        await page.get_by_role("button", name="over time").click()
        await expect(page.get_by_label("Loss. loss: from 10.3 at 2 min")).to_be_visible()
        for title in ("Speed", "Gradient norm", "Learning rate", "Predicted over measured"):
            await expect(page.get_by_label(f"{title}. ")).to_be_visible()
        # The plan.
        await shows(
            "plan-view", "Stage 2", "layers 17–23", "runpod-2", "32 micro-batches", "no plan can take less", "6.6 s"
        )
        await shows("plan-view", "attic is quarantined: runpod-2 computes the last stage alone")
        await page.get_by_text("Flows, link by link").click()
        await expect(page.locator("#plan-view tbody tr").first).to_contain_text("activations i8b256")
        # Its past: a lane for each node, and the plans. One plan says what it changed.
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
        # An earlier page, by the same renderer.
        lost = next(each.sequence for each in records if each.event.event == "node_left")
        await page.get_by_label("Replay", exact=True).fill(str(lost - 1))
        await shows("state", f"replay: event {lost - 1}")
        await shows("figures", "60 of 240", "5 nodes now")
        await shows("plan-view", "vast-7", "attic", "is idle: its fastest link to the plan's nodes carries 112 Mbit/s")
        await shows("plan-view", "It would help: a line of 168 Mbit/s")
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
        # Each reason of a plan once; events by how serious they are.
        main = await page.locator("main").inner_text()
        assert main.count("runpod-2 computes the last stage alone") == 1
        await page.get_by_role("button", name="problems (1)", exact=True).click()
        await expect(page.locator("#events-view li")).to_have_count(1)
        await page.get_by_role("button", name=re.compile("warnings and problems")).click()
        await expect(page.locator("#events-view li")).to_have_count(4)
        await page.get_by_role("button", name="all", exact=True).click()
        # For everybody, everywhere.
        for scheme in ("dark", "light"):
            await page.emulate_media(color_scheme=scheme)
            await nothing_hinders(page)
        tops = await page.eval_on_selector_all(".figure", "all => all.map((one) => one.getBoundingClientRect().top)")
        assert (len(tops), len(set(tops))) == (7, 2), "seven tiles in two rows"
        await page.set_viewport_size({"width": 390, "height": 844})
        await page.reload()
        await page.wait_for_function("document.documentElement.scrollWidth === 390")
        await shows("figures", "180 of 240")
        await page.wait_for_function(f"document.documentElement.scrollHeight <= {4 * 844}")
        await nothing_hinders(page)
        await page.screenshot(path=PICTURES / "phone.png", full_page=True)
    assert not problems


async def nothing_hinders(page: Page) -> None:
    """Nobody who sees or hears the page otherwise is kept from it."""
    found = await Axe().run(page)
    serious = [f for f in found.response["violations"] if f["impact"] in ("serious", "critical")]
    assert not serious, found.generate_report()


ANSWERS: dict[str, tuple[Callable[[], list[Record]], str, str | re.Pattern[str]]] = {
    "healthy, and who is slow": (slow_run, "verdict", "slow: runpod-2 takes 2.9 times the planned time, since "),
    "when over": (slow_run, "figures", re.compile(r"Ends\w{3} \d+ \w{3}, \d\d:\d\d in 1\d min ")),
    "cost": (slow_run, "figures", re.compile(r"1\.\d\d EUR 1\.90 EUR an hour, about 1\.\d\d EUR in all")),
    "which plan changed, and why": (
        slow_run,
        "plan-view",
        ", after step 150attic is quarantined: runpod-2 computes the last stage alone",
    ),
    "who gave most": (slow_run, "given-view", "home-409035.3%"),
    "why idle": (idle_run, "plan-view", "attic is idle: its fastest link to the plan's nodes carries 112 Mbit/s"),
    "did the loss go wrong": (rising_run, "verdict", "loss rises since step 181, from about 3.52 to 4.4"),
    "how long so far": (early_run, "figures", re.compile(r"Elapsed\d+ ")),
    "waits for whom": (early_run, "verdict", "waits for lab-3090 (reads the run and its data)"),
}
"""By question of a person: the run, the part of the page, and the answer that it must show there."""


async def test_what_people_ask_is_answered_where_it_can_be_seen(tmp_path: Path) -> None:
    problems = list[str]()
    async with browser_at("about:blank", problems) as page:
        for number, story in enumerate(dict.fromkeys(story for story, _, _ in ANSWERS.values())):
            (folder := tmp_path / str(number)).mkdir()
            async with page_of(story(), folder) as served:
                for width in (1280, 390):
                    await page.set_viewport_size({"width": width, "height": 844})
                    await page.goto(served.link)
                    for question, (of, where, answer) in ANSWERS.items():
                        if of is story:
                            await expect(page.locator(f"#{where}"), question).to_contain_text(answer)
                            await expect(page.locator(f"#{where}")).to_be_visible()
                await page.wait_for_function(f"document.documentElement.scrollHeight <= {4 * 844}")
                await page.wait_for_function("document.documentElement.scrollWidth <= 390")
                await page.goto("about:blank")
    assert not problems


@pytest.mark.soak
async def test_curves_are_smooth_or_raw_and_are_saved_as_pictures_and_as_figures(tmp_path: Path) -> None:
    problems = list[str]()
    async with page_of(stored_run(), tmp_path) as served, browser_at(served.link, problems) as page:
        lines = page.locator("#curves figure").first.locator("path.line")
        await expect(lines).to_have_count(3)  # the loss raw and smooth, and the held-out loss
        await page.get_by_role("button", name="raw", exact=True).click()
        await expect(lines).to_have_count(2)
        await page.locator("#curves figure").first.locator("svg").hover(position={"x": 300, "y": 100})
        await expect(page.locator("#curves .readout").first).to_contain_text(re.compile(r"step \d+ · loss \d"))
        async with page.expect_download() as saved:
            await page.get_by_role("button", name="Save CSV").click()
        rows = (await (await saved.value).path()).read_text().splitlines()
        head = "step,time,loss,tokens_per_second,gradient_norm,learning_rate,predicted_over_measured,busy,cost,held_out_loss"
        assert (rows[0], len(rows)) == (head, 181)
        *_, held_out = rows[50].split(",")
        assert rows[50].startswith("50,")
        assert float(held_out) == pytest.approx(6.408, abs=0.01)
        async with page.expect_download() as saved:
            await page.get_by_role("button", name="Save picture").click()
        picture = ElementTree.parse(await (await saved.value).path()).getroot()
        strokes = [each.get("stroke") for each in picture.iter("{http://www.w3.org/2000/svg}path")]
        assert len(strokes) == 6, "all curves: raw, and the held-out loss"
        assert all(stroke and stroke.startswith("rgb") for stroke in strokes), (
            "it looks the same without the page's style"
        )
    assert not problems


async def test_after_its_end_the_page_is_the_runs_report(tmp_path: Path) -> None:
    problems = list[str]()
    async with page_of(finished_run(), tmp_path) as served, browser_at(served.link, problems) as page:
        await expect(page.locator("#verdict")).to_contain_text("finished: all 240 steps are done")
        await expect(page.locator("#figures")).to_contain_text("Ended")
        await expect(page.locator("#plan-view")).to_contain_text("runpod-2")
        await expect(page.locator("#given-view")).to_contain_text("NVIDIA A100-SXM4-40GB: ")
        await expect(page.locator("#nodes")).to_contain_text("quarantined")
        await expect(page.locator("#links")).to_be_hidden()
        assert "No node" not in await page.locator("main").inner_text()
    assert not problems


async def test_without_prices_one_line_says_how_they_are_given(tmp_path: Path) -> None:
    records = stored_run()
    records[0] = replace(records[0], event=ev.RunStarted("id", {"name": "free", "train": {"steps": 240}}))
    async with page_of(records, tmp_path) as served, browser_at(served.link, []) as page:
        await expect(page.locator("#figures .quiet")).to_contain_text("dtfm-coordinator set cluster.prices=")
        await expect(page.locator(".figure")).to_have_count(6)


@pytest.mark.soak
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
        await expect(page.locator("#verdict")).to_contain_text("waits for nodes: none is here")
        assert page.url == address
        await page.go_back()
        assert page.url == elsewhere
        await page.goto(address)
        await expect(page.locator("#figures")).to_contain_text("0 nodes now")
        await served.server.ask(wire.RevokeRequest(what=link.id), served.operator)
        await expect(page.locator("main")).to_contain_text(f"invitation {link.id} was revoked")
        await expect(page.locator("main")).to_contain_text("dtfm-coordinator invite --role viewer")

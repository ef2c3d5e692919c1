"""What the page takes in a browser: ``python -m tests.bench.page [--nodes 64] [--steps 500000] [--minutes 60] [--json]``.

The log of a long run is written as for tests/bench/month.py, and its page served, when its story has been read from the last
snapshot. Chromium opens it: the benchmark measures the time until it paints something, and until the run's figures are there.
Then the run goes on for ``--minutes``, with a step every five seconds. The steps follow each other without a pause; each is
drawn before the next comes. The memory of the page's JavaScript is compared before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from playwright.async_api import CDPSession, Page, async_playwright, expect

from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.store.store import Store
from dtfm.coordinator.view import follower
from dtfm.coordinator.view.follower import Follower
from dtfm.coordinator.view.story_snapshot import story_of
from dtfm.coordinator.web import app
from dtfm.coordinator.web.app import make_app
from dtfm.coordinator.web.serving import bind_page, link_to, page_served
from tests.bench.month import keep_a_snapshot, steps, write
from tests.bench.rows import Row, show
from tests.coordinator.web.serving_page import refuse

LOADS = 5
WARM_STEPS = 30
"""The steps before the page's memory is measured first."""


async def heap(session: CDPSession) -> float:
    """The bytes of the heap, after a collection of garbage."""
    await session.send("HeapProfiler.collectGarbage")
    found = await session.send("Performance.getMetrics")
    return float(next(each["value"] for each in found["metrics"] if each["name"] == "JSHeapUsedSize"))


async def loads(page: Page, link: str) -> tuple[float, float]:
    """Seconds until something is painted, and until the figures are there."""
    began = time.monotonic()
    await page.goto(link)
    await expect(page.locator("#figures")).to_contain_text("of")
    figures = time.monotonic() - began
    paint = await page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    return paint / 1e3, figures


async def measured(path: Path, nodes: int, number: int, minutes: int) -> list[Row]:
    more = minutes * 12
    app.PAUSE_SECONDS, follower.SHORTEST_PAUSE = 0.01, 0.01
    events = steps(nodes, number + more)
    with Store(f"sqlite:///{path}", write=True) as store:
        write(store, itertools.islice(events, number + nodes + 2))
        keep_a_snapshot(store)
        socket = bind_page("127.0.0.1:0")
        began = time.monotonic()
        following = Follower(store, story_of(store.snapshots(store.last), store.read))
        ready = time.monotonic() - began
        task = asyncio.create_task(following.follow())
        chromium = shutil.which("chromium")
        async with page_served(socket, make_app(following, Ledger, refuse)), async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = await browser.new_page(viewport={"width": 1280, "height": 900})
            found = [await loads(page, link_to(socket)) for _ in range(LOADS)]
            session = await page.context.new_cdp_session(page)
            await session.send("Performance.enable")
            first = 0.0
            for index, event in enumerate(events, 1):
                for record in store.append([event]):
                    following.wake(record)
                await expect(page.locator("#figures")).to_contain_text(re.compile(f"Step{number + index:,} of"))
                if index == WARM_STEPS:
                    first = await heap(session)
            last = await heap(session)
            await browser.close()
        task.cancel()
        await asyncio.wait([task])
        await following.close()
    paints, figures = zip(*found, strict=True)
    return [
        Row("the story, from the last snapshot", ready, "s"),
        Row("first paint, median", statistics.median(paints), "s"),
        Row("the run's figures, median", statistics.median(figures), "s"),
        Row(f"JavaScript's memory after {WARM_STEPS} steps", first / 1e6, "MB"),
        Row(f"after {more} steps, {minutes} minutes of the run", last / 1e6, "MB"),
        Row("more", (last - first) / 1e6, "MB"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measured(Path(folder) / "dtfm.db", arguments.nodes, arguments.steps, arguments.minutes))
    show(f"The page of {arguments.steps} steps of {arguments.nodes} nodes", rows, arguments.json)


if __name__ == "__main__":
    main()

"""Pictures of the page, for people to look at: ``python -m tests.bench.pictures [--folder build/page] [--docs]``.

Each story of tests/coordinator/web/stored_run.py is served, and Chromium takes the page of it in light, in dark, and as a phone
shows it. ``--docs`` writes the two pictures that the docs show.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from playwright.async_api import Browser, Page, async_playwright, expect

from dtfm.coordinator.store.store import Record
from tests.coordinator.web import stored_run
from tests.coordinator.web.serving_page import page_of

STORIES: dict[str, Callable[[], list[Record]]] = {
    "planned": stored_run.stored_run,
    "slow": stored_run.slow_run,
    "rising": stored_run.rising_run,
    "idle": stored_run.idle_run,
    "finished": stored_run.finished_run,
}
WIDE, PHONE = (1280, 900), (390, 844)


async def opened(browser: Browser, link: str, size: tuple[int, int], scheme: str) -> Page:
    """The page, when it shows the run."""
    page = await browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)  # type: ignore[arg-type]
    await page.goto(link)
    await expect(page.locator("#figures")).to_contain_text("of")
    await page.wait_for_function(f"document.documentElement.scrollWidth <= {size[0]}")
    return page


async def take(folder: Path, docs: Path | None) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, story in STORIES.items():
            with tempfile.TemporaryDirectory() as store:
                async with page_of(story(), Path(store)) as served:
                    for kind, size, scheme in (
                        ("light", WIDE, "light"),
                        ("dark", WIDE, "dark"),
                        ("phone", PHONE, "light"),
                    ):
                        page = await opened(browser, served.link, size, scheme)
                        await page.screenshot(path=folder / f"{name}-{kind}.png", full_page=True)
                        if docs is not None and name == "slow" and kind != "dark":
                            picture = docs / ("page-phone.png" if kind == "phone" else "page.png")
                            await page.screenshot(path=picture)
                        print(folder / f"{name}-{kind}.png")
                        await page.close()
        await browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/page"))
    parser.add_argument("--docs", action="store_true", help="write docs/page.png and docs/page-phone.png")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(take(arguments.folder, Path("docs") if arguments.docs else None))


if __name__ == "__main__":
    main()

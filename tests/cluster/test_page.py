"""The page of a real run in Chromium: what a person sees of a kill, and that an operator's button reaches the nodes."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, run_file
from tests.coordinator.web.test_browser import browser_at


@pytest.mark.soak
async def test_a_person_sees_a_node_die_what_came_of_it_and_pauses_the_run(tmp_path: Path) -> None:
    text, problems = run_file(model=GPT2, stages=[2, 1], steps=100_000, learning_rate=1e-3), list[str]()
    with Cluster(tmp_path, text, nodes=["attic", "basement", "cellar"]) as cluster:
        plan = cluster.wait_for("plan_started") and cluster.of("plan_adopted")[-1]["plan"]
        dies, stays = plan["stages"][0]["replicas"]
        (alone,) = plan["stages"][1]["replicas"]
        async with browser_at(cluster.invite("--role", "operator")["page"], problems) as page:
            await expect(page.locator("#figures")).to_contain_text(re.compile(r"Step[1-9]\d* of 100,000"))
            await expect(page.locator("#plan-view")).to_contain_text("Stage 1")
            await expect(page.locator(".map tbody tr")).to_have_count(3)
            await expect(page.locator("#nodes-view").get_by_role("row", name=dies)).to_contain_text("stage 0")
            cluster.nodes[dies].send(signal.SIGKILL)
            await expect(page.locator("#events-view")).to_contain_text(f"{dies} left")
            await expect(page.locator("#figures")).to_contain_text("2 nodes now")
            await expect(page.locator(".lanes title", has_text="left: ")).not_to_have_count(0)
            # It may be a plan or two later: whoever waits for the dead one may notice before the coordinator does.
            new = cluster.wait_for("plan_adopted", where=lambda event: dies not in str(event["plan"]["stages"]))[
                "generation"
            ]
            await expect(page.get_by_role("button", name=f"Plan {new}")).to_be_visible()
            await expect(page.locator("#given-view")).to_contain_text(f"{dies} has left")
            after = cluster.wait_for("plan_started", where=lambda event: event["generation"] >= new)["step"]
            await expect(page.locator("#plan-view")).to_contain_text(stays)
            await page.get_by_role("button", name=f"Plan {new}").click()
            await expect(page.locator("#detail")).to_contain_text(f"Plan {new}, after step")
            await page.keyboard.press("Escape")
            await page.locator("#nodes-view").get_by_role("row", name=alone).get_by_role("button").click()
            await expect(page.locator("#detail")).to_contain_text("a step")
            await page.keyboard.press("Escape")
            await page.get_by_role("button", name="Pause").click()
            await expect(page.locator("#state")).to_contain_text("paused")
            assert cluster.wait_for("run_paused")
            await page.get_by_role("button", name="Continue").click()
            gone_on = len(cluster.events)
            assert cluster.wait_for("step_committed", after=gone_on)["step"] > after
            await page.get_by_role("button", name="Stop…").click()
            await page.get_by_role("button", name="Stop the run").click()
            assert cluster.coordinator is not None
            assert cluster.coordinator.wait(60) == 0
        assert [cluster.nodes[name].wait(30) for name in (stays, alone)] == [0, 0]
    assert not [said for said in problems if "ERR_" not in said], "that the coordinator has gone the browser may say"

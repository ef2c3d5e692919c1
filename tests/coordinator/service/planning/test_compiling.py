"""The scheduler is compiled before the first plan is wanted: `service/planning/planner.py`."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from dtfm.coordinator.core.state.planner import PlanChosen
from dtfm.coordinator.core.transition import PlanWanted
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.service.planning import planner
from dtfm.coordinator.service.planning.planner import choose
from tests.coordinator.serving import run_in, serving


async def test_a_warm_cache_needs_no_other_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dtfm")
    monkeypatch.setattr(planner, "is_compiled", lambda: True)
    monkeypatch.setattr(planner, "compile_apart", None)
    await planner.compile_scheduler()
    monkeypatch.setattr(planner, "warm_up", lambda: None)
    monkeypatch.setattr(planner, "WORTH_A_WORD", 0.0)
    caplog.clear()
    await planner.compile_scheduler()
    assert [record.getMessage() for record in caplog.records] == [
        "Compiled the scheduler in 0 s; this is kept for the next start."
    ]


async def test_the_process_that_compiles_ends_with_its_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "NUMBA_CACHE_DIR", str(tmp_path)
    )  # an empty cache: compiling takes many times as long as this test
    monkeypatch.setattr(planner, "is_compiled", lambda: False)
    started: asyncio.Future[asyncio.subprocess.Process] = asyncio.get_running_loop().create_future()
    start = asyncio.create_subprocess_exec

    async def spy(*command: str, **options: int) -> asyncio.subprocess.Process:
        process = await start(*command, **options)  # type: ignore[arg-type]
        started.set_result(process)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spy)
    work = asyncio.create_task(planner.compile_scheduler())
    process = await started
    assert process.returncode is None
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert process.returncode == -9


async def test_what_cannot_be_compiled_is_said_once_and_raised_by_the_planner(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise OSError("no room")

    monkeypatch.setattr(planner, "is_compiled", lambda: True)
    monkeypatch.setattr(planner, "warm_up", fails)
    await planner.compile_scheduler()
    assert "the scheduler could not be compiled" in caplog.text
    assert "no room" in caplog.text


async def test_the_first_plan_waits_until_the_scheduler_is_compiled_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = asyncio.Event()

    async def compile_scheduler() -> None:
        await compiled.wait()

    def plan(wanted: PlanWanted, *_: object) -> PlanChosen | str:
        assert compiled.is_set()
        return choose(wanted)

    monkeypatch.setattr("dtfm.coordinator.service.planning.planner.compile_scheduler", compile_scheduler)
    monkeypatch.setattr("dtfm.coordinator.service.planning.planner.choose", plan)
    async with serving(tmp_path, run_in(tmp_path)) as served, AsyncExitStack() as stack:
        for name in "ab":
            await stack.enter_async_context(served.node(name))
        await served.until(lambda: served.server.state.planner.asked is not None)
        # A newcomer is welcomed, and prepares itself.
        await stack.enter_async_context(served.node("c"))
        await served.until(lambda: [e.node for e in served.events if isinstance(e, ev.NodeReady)] == ["a", "b", "c"])
        assert served.ledger.training.plan is None
        compiled.set()
        assert await asyncio.wait_for(asyncio.shield(served.task), 30) == 0


async def test_a_run_that_ends_while_the_scheduler_is_compiled_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()

    async def compile_scheduler() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr("dtfm.coordinator.service.planning.planner.compile_scheduler", compile_scheduler)
    async with serving(tmp_path) as served:
        await served.until(lambda: bool(served.events))
        served.server.ask_to_stop("the test asks")
        assert await asyncio.wait_for(asyncio.shield(served.task), 30) == 1
    assert ended.is_set()

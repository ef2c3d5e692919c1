"""Writing the log: `service/log_writer.py`."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dtfm.coordinator.log import events as ev, step_times
from dtfm.coordinator.log.ledger import fold
from dtfm.coordinator.log.store import Store, StoreError
from dtfm.coordinator.service.log_writer import LogWriter
from tests.coordinator.serving import serving, train


@pytest.mark.parametrize("failures", [0, 1], ids=["", "after the log could not be read once"])
async def test_the_times_of_old_steps_are_summed_up_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(step_times, "EVERY", 5)
    monkeypatch.setattr(step_times, "KEPT", 3)
    async with serving(tmp_path) as served:
        left, read = iter(range(failures)), served.store.step_times

        def may_fail(after: int, until: int) -> ev.StepTimesSummed:
            if next(left, None) is not None:
                raise StoreError("the disk cannot be read")
            return read(after, until)

        monkeypatch.setattr(served.store, "step_times", may_fail)
        assert await train(served, served.node("a"), served.node("b")) == 0
        kept = [record.event for record in served.store.read()]
        summed = [event for event in kept if isinstance(event, ev.StepTimesSummed)]
        assert [(event.after, event.until) for event in summed[:2]] == [(0, 5), (5, 10)]
        until = summed[-1].until
        told = [event for event in served.events if not isinstance(event, ev.StepCommitted)]
        assert told == [event for event in kept if not isinstance(event, ev.StepCommitted)]
        steps = [(number, event) for number, event in enumerate(kept, 1) if isinstance(event, ev.StepCommitted)]
        assert all(bool(event.compute_seconds) == (number > until) for number, event in steps)
        assert fold(kept) == fold(served.events)


async def test_a_write_does_not_wait_for_what_hangs_in_other_threads(tmp_path: Path) -> None:
    hangs, loop = threading.Event(), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    hung = asyncio.ensure_future(asyncio.to_thread(hangs.wait))
    try:
        with Store(f"sqlite:///{tmp_path / 'dtfm.db'}", write=True) as store:
            writer = LogWriter(store)
            await asyncio.wait_for(writer.append([ev.Waiting("for the test")]), 10)
            await writer.close()
            assert store.last == 1
    finally:
        hangs.set()
        await hung

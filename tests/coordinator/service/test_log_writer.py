"""Writing the log: `service/log_writer.py`."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.service.log_writer import LogWriter
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.store.store import Store


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


async def test_what_cannot_be_shown_is_written_and_told_to_others_all_the_same(tmp_path: Path) -> None:
    """As on a terminal that is gone, or a full disk."""
    shown = list[int]()

    def fails(record: Record) -> None:
        raise OSError(28, "No space left on device")

    with Store(f"sqlite:///{tmp_path / 'dtfm.db'}", write=True) as store:
        writer = LogWriter(store)
        for listener in (fails, lambda record: shown.append(record.sequence)):
            writer.on_event(listener)
        await writer.append([ev.Waiting("for the test")] * 2)
        await writer.close()
        assert (store.last, shown) == (2, [1, 2])


async def test_a_follower_reads_what_was_written_last_while_it_read_a_page(tmp_path: Path) -> None:
    """A follower that has just read that nothing is new, as the run's last event is written and the log ends."""
    with Store(f"sqlite:///{tmp_path / 'dtfm.db'}", write=True) as store:
        writer, loop = LogWriter(store), asyncio.get_running_loop()
        read_page = store.page

        async def end() -> None:
            await writer.append([ev.Waiting("for the test")])
            writer.let_follow(False)

        def page(after: int) -> list[Record]:
            found = read_page(after)
            if store.last == 0:
                asyncio.run_coroutine_threadsafe(end(), loop).result()
            return found

        store.page = page  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            assert [record.sequence async for record in writer.records(0, follow=True)] == [1]
        await writer.close()

"""The ledger snapshots that the log's writer stores: `service/log_writer.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtfm.coordinator.log import ledger_snapshot
from dtfm.coordinator.log.fold import fold
from dtfm.coordinator.log.store import LedgerSnapshot, StoreError
from tests.coordinator.serving import serving, train


async def test_a_ledger_snapshot_is_stored_at_intervals_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_snapshot, "EVERY", 5)
    async with serving(tmp_path) as served:
        assert await train(served, served.node("a"), served.node("b")) == 0
        last, before = served.store.snapshots()
        assert last.sequence == served.store.last
        assert 5 <= before.sequence < last.sequence
        for snapshot in (last, before):
            assert ledger_snapshot.read(snapshot) == fold(served.events[: snapshot.sequence])


async def test_a_full_disk_costs_only_the_ledger_snapshot_and_causes_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: LedgerSnapshot) -> None:
        raise StoreError("the disk is full")

    async with serving(tmp_path) as served:
        monkeypatch.setattr(served.store, "keep", full)
        assert await train(served, served.node("a"), served.node("b")) == 0
        assert f"no ledger snapshot of event {served.store.last}: the disk is full" in caplog.text

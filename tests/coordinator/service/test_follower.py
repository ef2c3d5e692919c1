"""Who follows the log keeps story snapshots of it: `view/follower.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtfm.coordinator.log.ledger import fold
from dtfm.coordinator.store.record import Snapshot, StoreError
from dtfm.coordinator.view import follower, story_snapshot
from tests.coordinator.serving import serving, train


async def test_a_story_snapshot_is_stored_at_intervals_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(story_snapshot, "EVERY", 5)
    monkeypatch.setattr(follower, "SHORTEST_PAUSE", 0.0)
    async with serving(tmp_path) as served:
        assert await train(served, served.node("a"), served.node("b")) == 0
        last, before, *_ = served.store.snapshots(served.store.last)
        assert last.sequence == served.store.last
        assert 5 <= before.sequence < last.sequence
        for snapshot in (last, before):
            assert story_snapshot.read(snapshot).now.ledger == fold(served.events[: snapshot.sequence])


async def test_a_full_disk_costs_only_the_story_snapshot_and_causes_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: Snapshot) -> None:
        raise StoreError("the disk is full")

    async with serving(tmp_path) as served:
        monkeypatch.setattr(served.store, "keep", full)
        assert await train(served, served.node("a"), served.node("b")) == 0
        assert f"no story snapshot of event {served.store.last}: the disk is full" in caplog.text

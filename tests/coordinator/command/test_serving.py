"""When a reserve is no longer needed: `command/serving.py`."""

from __future__ import annotations

from pathlib import Path

from dtfm.coordinator.command.serving import MOST_AFTER, was_stopped
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.store import Store


def test_a_run_was_stopped_unless_a_coordinator_has_gone_on_with_it(tmp_path: Path) -> None:
    with Store(f"sqlite:///{tmp_path / 'dtfm.db'}", write=True) as store:
        assert not was_stopped(store)
        store.append([ev.RunStopped(7, "by an operator")])
        assert was_stopped(store)
        store.append([ev.Waiting("for nothing")] * (MOST_AFTER - 1))
        assert was_stopped(store)
        store.append([ev.RunResumed("from the log", {}, {})])
        assert not was_stopped(store)

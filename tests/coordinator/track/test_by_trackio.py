"""trackio's own folder: what is in its SQLite file."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import huggingface_hub
import pytest
import trackio.sqlite_storage as storage

from dtfm.coordinator.track import by_trackio
from dtfm.coordinator.track.tracker import TrackerError, put, tracked
from dtfm.coordinator.view.so_far import SoFar
from tests.coordinator.track.curves import Curves, curves_of
from tests.coordinator.web.stored_run import stored_run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """trackio's: it looks into the environment once, when it is imported."""
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr(by_trackio, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    return tmp_path / "trackio"


def write(most: int | None) -> int:
    """Writes the first records of a run as a new process; returns the number of the last point that was there."""
    so_far, records = SoFar(), stored_run()
    so_far.add(records[0])
    writer = by_trackio.Writer("p", tracked(so_far.ledger))
    had = writer.has
    for record in records[1:most]:
        so_far.add(record)
        put(writer, so_far, record)
    writer.close()
    return had


def test_trackios_file_has_the_points_of_the_page_each_once(folder: Path) -> None:
    assert write(100) == 0
    assert write(None) == 100
    assert write(None) == len(stored_run())
    with sqlite3.connect(folder / "p.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    curves = Curves()
    for name, step, metrics in rows:
        assert name == "stories-1b-id"
        for figure, value in json.loads(metrics).items():
            curves.setdefault(figure, []).append((step, value))
    assert curves == curves_of(stored_run())
    assert len(storage.SQLiteStorage.get_logs("p", "stories-1b-id")) == len(rows), "as its dashboard reads them"


def test_what_a_person_must_mend_is_said(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(TrackerError, match=rf"{folder} cannot be written \(.+\); make room, .+, or set TRACKIO_DIR"):
        by_trackio.check("p")
    with pytest.raises(TrackerError, match=r"no token for the hub; set HF_TOKEN, or name a local project"):
        by_trackio.check("owner/space")

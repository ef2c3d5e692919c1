"""trackio's own folder: the contents of its SQLite file."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import huggingface_hub
import pytest
import trackio
from trackio import sqlite_storage as storage
from trackio.remote_client import RemoteClient

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


def write(most: int | None, place: str = "p") -> int:
    """Writes the first records of a run as a new process; returns the number of the last point that was there."""
    so_far, records = SoFar(), stored_run()
    so_far.add(records[0])
    writer = by_trackio.Writer(place, tracked(so_far.ledger))
    had = writer.has
    for record in records[1:most]:
        so_far.add(record)
        put(writer, so_far, record)
    writer.close()
    return had


def points_in(file: Path) -> Curves:
    with closing(sqlite3.connect(file)) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    curves = Curves()
    for name, step, metrics in rows:
        assert name == "stories-1b-id"
        for figure, value in json.loads(metrics).items():
            curves.setdefault(figure, []).append((step, value))
    return curves


def test_trackios_file_has_the_points_of_the_page_each_once(folder: Path) -> None:
    assert write(100) == 0
    assert write(None) == 100
    assert write(None) == len(stored_run())
    assert points_in(folder / "p.db") == curves_of(stored_run())
    shown = storage.SQLiteStorage.get_logs("p", "stories-1b-id")
    assert [each["step"] for each in shown if "loss" in each] == list(range(1, 181)), "as its dashboard reads them"


def test_what_a_person_must_mend_is_said(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(TrackerError, match=rf"{folder} cannot be written \(.+\); make room, .+, or set TRACKIO_DIR"):
        by_trackio.check("p")
    with pytest.raises(TrackerError, match=r"no token for the hub; set HF_TOKEN, or name a local project"):
        by_trackio.check("owner/space")


def test_a_server_of_trackio_gets_the_points_each_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Space runs it, but on this machine: the hub's door is left out."""
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "a token")
    app, _, _, url = trackio.show(open_browser=False, block_thread=False, host="127.0.0.1")
    try:
        monkeypatch.setattr(by_trackio, "RemoteClient", lambda _space, hf_token: RemoteClient(url))
        assert write(100, "owner/space") == 0
        assert write(None, "owner/space") == 0, "it cannot be asked"
    finally:
        app.close()
    assert points_in(folder / "space.db") == curves_of(stored_run())

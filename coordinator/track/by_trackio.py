"""Curves for trackio: in its own folder on this disk, or at a Space on the Hugging Face hub.

A point's id names the event of the log, and trackio keeps each id once. Its ``init`` is not used: it prints to standard output,
and watches this machine's hardware.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import Any

import huggingface_hub
from trackio.remote_client import RemoteClient
from trackio.sqlite_storage import SQLiteStorage
from trackio.utils import TRACKIO_DIR

from dtfm.coordinator.track.tracker import TrackedRun, Tracker, TrackerError
from dtfm.coordinator.view.curves import Reading

MOST_WAITING = 500
"""The most points that are sent together."""


def check(place: str) -> None:
    """Raises TrackerError unless the folder can be written, or there is a token for the hub."""
    if "/" not in place:
        with _explained():
            SQLiteStorage.validate_project_name(place)
            SQLiteStorage.init_db(place)
    elif not huggingface_hub.get_token():
        raise TrackerError(
            "trackio has no token for the hub; set HF_TOKEN, or name a local project without a slash, like trackio:stories"
        )


def Writer(place: str, run: TrackedRun) -> Tracker:
    """The writer for this place, which may be a project or a Space."""
    check(place)
    return SpaceWriter(place, run) if "/" in place else FolderWriter(place, run)


class Points:
    """Collects points until they are stored."""

    def __init__(self, project: str, run: TrackedRun) -> None:
        self.has = 0
        self._project, self._run = project, run
        self._waiting: list[tuple[int, Reading]] = []

    def write(self, sequence: int, figures: Reading) -> None:
        self._waiting.append((sequence, figures))
        self.has = sequence
        if len(self._waiting) >= MOST_WAITING:
            self.flush()

    def back_to(self, time: float, step: int) -> None:
        """Keeps the points of later steps: the curves go back to the step, and on from it."""

    def flush(self) -> None:
        if self._waiting:
            self._store(self._waiting)
            self._waiting = []

    def close(self) -> None:
        self.flush()

    def _store(self, points: list[tuple[int, Reading]]) -> None:
        raise NotImplementedError

    def _id(self, sequence: int) -> str:
        return f"{self._run.id}-{sequence}"


class FolderWriter(Points):
    """Writes an SQLite file for each project. ``TRACKIO_DIR`` in the environment says where."""

    def __init__(self, project: str, run: TrackedRun) -> None:
        super().__init__(project, run)
        with _explained(), closing(sqlite3.connect(SQLiteStorage.get_project_db_path(project))) as database:
            last = "SELECT log_id FROM metrics WHERE run_id = ? ORDER BY id DESC LIMIT 1"
            row = database.execute(last, (run.id,)).fetchone()
        number = str(row[0] if row else "").rpartition("-")[2]
        self.has = int(number) if number.isdecimal() else 0

    def _store(self, points: list[tuple[int, Reading]]) -> None:
        with _explained():
            SQLiteStorage.bulk_log(
                self._project,
                self._run.label,
                [figures.values for _, figures in points],
                steps=[figures.step for _, figures in points],
                timestamps=[datetime.fromtimestamp(figures.time, UTC).isoformat() for _, figures in points],
                config=dict(self._run.settings),
                log_ids=[self._id(sequence) for sequence, _ in points],
                run_id=self._run.id,
            )


class SpaceWriter(Points):
    """Writes by HTTP. It has no way to ask for the last point. So a new process sends all points again, and the Space keeps
    each once."""

    def __init__(self, space: str, run: TrackedRun) -> None:
        super().__init__(space.rpartition("/")[2], run)
        self._client = connected(space)

    def _store(self, points: list[tuple[int, Reading]]) -> None:
        logs: list[dict[str, Any]] = [
            {
                "project": self._project,
                "run": self._run.label,
                "run_id": self._run.id,
                "metrics": figures.values,
                "step": figures.step,
                "config": dict(self._run.settings),
                "log_id": self._id(sequence),
            }
            for sequence, figures in points
        ]
        self._client.predict(api_name="/bulk_log", logs=logs, hf_token=huggingface_hub.get_token())


def connected(space: str) -> Any:
    """A client of the Space, which its owner has made."""
    try:
        return RemoteClient(space, hf_token=huggingface_hub.get_token())
    except Exception as error:  # of the libraries below
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise TrackerError(
            f"{first}; to make the Space: trackio sync --project {space.rpartition('/')[2]} --space-id {space}"
        ) from None


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise TrackerError(
            f"{TRACKIO_DIR} cannot be written ({getattr(error, 'strerror', None) or error}); make room, let this user write "
            "there, or set TRACKIO_DIR"
        ) from None

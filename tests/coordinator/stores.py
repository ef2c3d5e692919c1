"""A test's store: in SQLite, unless the environment says DTFM_TEST_DATABASE=postgresql. And the problems that a log has."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dtfm.coordinator.store.check import Checked, Checking
from dtfm.coordinator.store.record import Record


def store_url(folder: Path) -> str:
    return url_in(os.environ.get("DTFM_TEST_DATABASE", "sqlite"), folder)


def url_in(database: str, folder: Path) -> str:
    """``database``: "sqlite" or "postgresql"."""
    if database == "sqlite":
        return f"sqlite:///{folder / 'dtfm.db'}"
    from tests import postgres  # takes a tenth of a second

    return postgres.database(folder)


def checked(records: Iterable[Record]) -> Checked:
    """What is found in a whole log."""
    checking = Checking()
    for record in records:
        checking.add(record)
    return checking.result

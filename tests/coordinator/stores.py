"""Where a test's store is: in SQLite, unless the environment says DTFM_TEST_DATABASE=postgresql."""

from __future__ import annotations

import os
from pathlib import Path


def store_url(folder: Path) -> str:
    return url_in(os.environ.get("DTFM_TEST_DATABASE", "sqlite"), folder)


def url_in(database: str, folder: Path) -> str:
    """``database``: "sqlite" or "postgresql"."""
    if database == "sqlite":
        return f"sqlite:///{folder / 'dtfm.db'}"
    from tests import postgres  # takes a tenth of a second

    return postgres.database(folder)

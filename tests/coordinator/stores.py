"""Where a test's store is."""

from __future__ import annotations

from pathlib import Path


def store_url(folder: Path) -> str:
    return f"sqlite:///{folder / 'dtfm.db'}"

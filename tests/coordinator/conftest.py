"""Fixtures of the coordinator's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def in_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's store is an SQLite file, also where the others' are in PostgreSQL: it is about that file."""
    monkeypatch.setenv("DTFM_TEST_DATABASE", "sqlite")

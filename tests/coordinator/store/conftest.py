"""The tests of the store run on both databases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.coordinator.stores import url_in


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_in(request.param, tmp_path)

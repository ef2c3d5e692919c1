"""No test here may leave a process behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.leaks import processes_in


@pytest.fixture(autouse=True)
def nothing_left_running(tmp_path: Path) -> Iterator[None]:
    """The processes of a test work in its ``tmp_path``."""
    yield
    assert processes_in(tmp_path) == []

"""For all tests: one thread per process, as there are often more processes than cores; the nursery ends with the tests; and a
skip fails in CI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cluster.nursery import close_nursery
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport"]

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_nursery_left() -> Iterator[None]:
    yield
    close_nursery()

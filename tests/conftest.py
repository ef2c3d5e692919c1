"""For all tests: one thread per process, as there are often more processes than cores; and the nursery ends with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cluster.nursery import close_nursery

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_nursery_left() -> Iterator[None]:
    yield
    close_nursery()

"""Fixtures of the tests of members."""

from __future__ import annotations

import pytest

from tests.coordinator.doors import Door
from tests.coordinator.script import World


@pytest.fixture
def door() -> Door:
    return Door(World())

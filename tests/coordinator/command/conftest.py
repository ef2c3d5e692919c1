"""Fixtures of the commands' tests."""

from __future__ import annotations

import pytest

from tests.coordinator.command.typed import Typed


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    return Typed(monkeypatch, capsys)

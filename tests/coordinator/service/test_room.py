"""Waiting for room on the disk: `service/room.py`."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from dtfm.coordinator.service import room


def test_a_full_disk_is_waited_for_and_told_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [1000.0]
    full_until = clock[0] + 130.0

    def allocate(*_: object) -> None:
        if clock[0] < full_until:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    room.wait_for_room([tmp_path / "not there", tmp_path])
    assert clock[0] == full_until
    assert [record.message for record in caplog.records] == 3 * [
        f"the disk is full: make room in {tmp_path}. The run waits, and then goes on by itself"
    ]


def test_what_cannot_be_written_for_another_reason_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    room.wait_for_room([tmp_path])

"""Waiting for the store and its disk: `service/room.py`."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.service import room
from dtfm.coordinator.store.record import StoreError
from tests import postgres


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


class Waited:
    """Replaces the pauses: each is short, and ``begun`` says that there was one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=time.monotonic, sleep=self._pause))

    def _pause(self, seconds: float) -> None:
        self.begun.set()
        time.sleep(0.01)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_store_whose_database_has_a_full_disk_is_opened_once_there_is_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waited = Waited(monkeypatch)
    with postgres.database_on_a_full_disk() as (url, filler), ThreadPoolExecutor(1) as threads:
        opening = threads.submit(room.open_store, url, waits=False)
        try:
            assert waited.begun.wait(20)
            assert not opening.done()
        finally:
            filler.unlink()
        with opening.result(30) as store:
            assert store.append([ev.NodeReady("a")])[0].sequence == 1
    (said,) = (record.message for record in caplog.records)
    assert "the database's disk is full; make room. The run waits, and then goes on by itself" in said


def test_a_store_whose_database_is_away_is_opened_once_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url, waited = postgres.database(tmp_path), Waited(monkeypatch)
    with ThreadPoolExecutor(1) as threads:
        postgres.server().stop()
        try:
            opening = threads.submit(room.open_store, url, waits=False)
            assert waited.begun.wait(20)
        finally:
            postgres.server().start()
        opening.result(30).close()
    assert "if this is another store, end this and give --store" in caplog.records[0].message


def test_a_store_that_cannot_be_opened_for_another_reason_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file or directory"):
        room.open_store(f"sqlite:///{tmp_path}/nowhere/dtfm.db", waits=False)


def test_a_file_whose_opening_has_failed_can_be_opened_again(tmp_path: Path) -> None:
    """It is not locked by the attempt that failed."""
    (tmp_path / "dtfm.db").write_bytes(b"no database at all, but long enough to be looked at" * 50)
    for _ in range(2):
        with pytest.raises(StoreError, match="is not a database"):
            room.open_store(f"sqlite:///{tmp_path}/dtfm.db", waits=False)

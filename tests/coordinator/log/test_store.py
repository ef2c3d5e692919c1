"""The log on disk, and who may write to it: `log/store.py`."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import get_args

import pytest
import sqlalchemy as sa

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.store import Store, StoreError
from tests.coordinator.every_event import EVERY_EVENT
from tests.coordinator.stores import store_url


def test_every_event_is_read_back_from_the_store_unchanged(tmp_path: Path) -> None:
    assert {type(event) for event in EVERY_EVENT} == set(get_args(ev.Event))
    with Store(store_url(tmp_path), write=True) as store:
        written = store.append(EVERY_EVENT)
    with Store(store_url(tmp_path), write=False) as store:
        read = list(store.read())
        assert [record.event for record in read] == EVERY_EVENT
        assert read == written
        assert list(store.read(after=20)) == written[20:]


def test_sequence_numbers_continue_after_a_restart(tmp_path: Path) -> None:
    with Store(store_url(tmp_path), write=True) as store:
        store.append([ev.NodeReady("a"), ev.NodeReady("b")])
    with Store(store_url(tmp_path), write=True) as store:
        assert store.last == 2
        assert store.append([ev.NodeReady("c")])[0].sequence == 3


def test_an_append_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    with Store(store_url(tmp_path), write=True) as store:
        store.append([ev.NodeReady("a")])
        store._last = 0  # as if another process had written in between
        with pytest.raises(StoreError, match="another coordinator writes to it"):
            store.append([ev.NodeReady("b"), ev.NodeReady("c")])
        assert [record.event for record in store.read()] == [ev.NodeReady("a")]


def test_a_second_coordinator_cannot_open_the_store(tmp_path: Path) -> None:
    with Store(store_url(tmp_path), write=True):
        with pytest.raises(StoreError, match=r"another coordinator uses this store .*--store"):
            Store(store_url(tmp_path), write=True)
        with Store(store_url(tmp_path), write=False) as reader:
            assert list(reader.read()) == []
    Store(store_url(tmp_path), write=True).close()


def _write_and_die(store_url: str) -> None:
    store = Store(store_url, write=True)
    store.append([ev.NodeReady("a")])
    os._exit(9)


def test_a_coordinator_that_was_killed_leaves_its_log_and_no_lock(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_write_and_die, args=(store_url(tmp_path),))
    process.start()
    process.join(30)
    assert process.exitcode == 9
    with Store(store_url(tmp_path), write=True) as store:
        assert [record.event for record in store.read()] == [ev.NodeReady("a")]


def test_an_error_says_that_the_database_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(store_url(tmp_path), write=True) as store:
        store.append([ev.NodeReady("a")])
        monkeypatch.setattr(store, "_engine", sa.create_engine(store_url(tmp_path), connect_args={"timeout": 0}))
        other = sa.create_engine(store_url(tmp_path)).connect()
        other.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another process has locked it"):
            store.append([ev.NodeReady("b")])
        other.close()


def test_an_error_says_that_the_disk_is_full(tmp_path: Path) -> None:
    with Store(store_url(tmp_path), write=True) as store:
        store.append([ev.NodeReady("a")])
        with store._engine.connect() as connection:
            connection.exec_driver_sql(
                "PRAGMA max_page_count = 1"
            )  # of this connection, which the pool hands out again
        with pytest.raises(StoreError, match="the disk is full; make room"):
            store.append([ev.NodeLeft("a", "x" * 100_000)])


@pytest.mark.parametrize(
    ("store_url", "words"),
    [
        ("nonsense", "give a SQLAlchemy URL like sqlite:///dtfm.db"),
        ("nosuchdatabase://x", "give a SQLAlchemy URL"),
        ("sqlite:////nowhere/at/all/dtfm.db", "No such file or directory"),
    ],
)
def test_an_impossible_store_address_is_refused_with_its_reason(store_url: str, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        Store(store_url, write=True)


def test_opening_a_store_to_read_creates_none(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        Store(store_url(tmp_path), write=False)
    (tmp_path / "dtfm.db").write_bytes(b"no database at all, but long enough to be looked at" * 50)
    with pytest.raises(StoreError, match="is not a database"):
        Store(store_url(tmp_path), write=False)

"""The log on disk, and who may write to it: `store/store.py`."""

from __future__ import annotations

import multiprocessing
import os
from typing import get_args

import pytest
import sqlalchemy as sa
from sqlalchemy.pool import PoolProxiedConnection

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.store import Store, StoreError
from tests.coordinator.every_event import EVERY_EVENT


def test_every_event_is_read_back_from_the_store_unchanged(store_url: str) -> None:
    assert {type(event) for event in EVERY_EVENT} == set(get_args(ev.Event))
    with Store(store_url, write=True) as store:
        written = store.append(EVERY_EVENT)
    with Store(store_url, write=False) as store:
        read = list(store.read())
        assert [record.event for record in read] == EVERY_EVENT
        assert read == written
        assert list(store.read(after=20)) == written[20:]


def test_what_comes_after_a_long_gap_is_read_too(store_url: str) -> None:
    """So that `check` finds the gap."""
    with Store(store_url, write=True) as store:
        store.append([ev.NodeReady("a")] * 2500)
        with store._engine.begin() as connection:
            connection.execute(sa.text("DELETE FROM events WHERE sequence BETWEEN 100 AND 1899"))
    with Store(store_url, write=False) as store:
        assert [record.sequence for record in store.read()] == [*range(1, 100), *range(1900, 2501)]


def test_sequence_numbers_continue_after_a_restart(store_url: str) -> None:
    with Store(store_url, write=True) as store:
        store.append([ev.NodeReady("a"), ev.NodeReady("b")])
    with Store(store_url, write=True) as store:
        assert store.last == 2
        assert store.append([ev.NodeReady("c")])[0].sequence == 3


def test_an_append_is_stored_whole_or_not_at_all(store_url: str) -> None:
    with Store(store_url, write=True) as store:
        store.append([ev.NodeReady("a")])
        store._last = 0  # as if another process had written in between
        with pytest.raises(StoreError, match="another coordinator writes to it"):
            store.append([ev.NodeReady("b"), ev.NodeReady("c")])
        assert [record.event for record in store.read()] == [ev.NodeReady("a")]


def _write_and_die(store_url: str) -> None:
    store = Store(store_url, write=True)
    store.append([ev.NodeReady("a")])
    store.renew(0.5)
    os._exit(9)


def test_a_coordinator_that_was_killed_leaves_its_log_and_no_lock(store_url: str) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_write_and_die, args=(store_url,))
    process.start()
    process.join(30)
    assert process.exitcode == 9
    with Store(store_url, write=True) as store:
        assert [record.event for record in store.read()] == [ev.NodeReady("a")]


def test_an_append_whose_success_was_never_heard_of_is_not_written_twice(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(store_url, write=True) as store:
        store.append([ev.NodeReady("a")])
        dialect = store._engine.dialect
        commit, errors = dialect.do_commit, dialect.loaded_dbapi

        def commit_and_fail(connection: PoolProxiedConnection) -> None:
            commit(connection)
            raise errors.OperationalError("the connection broke")

        step = ev.StepCommitted(1, 1, 2.5, 8192, 0.5, 1.25, 32, {"a": 1.0}, {"a": 0.25})
        with monkeypatch.context() as patched:
            patched.setattr(dialect, "do_commit", commit_and_fail)
            with pytest.raises(StoreError, match="the connection broke"):
                store.append([step, ev.NodeReady("b")])
        written = store.append([step, ev.NodeReady("b")])
        assert [record.sequence for record in written] == [2, 3]
        assert store.append([ev.NodeReady("c")])[0].sequence == 4
        assert [record.sequence for record in store.read()] == [1, 2, 3, 4]


def test_an_append_that_failed_is_written_by_the_next_try(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(store_url, write=True) as store:
        dialect = store._engine.dialect
        errors = dialect.loaded_dbapi

        def fail(_: PoolProxiedConnection) -> None:
            raise errors.OperationalError("the connection broke")

        with monkeypatch.context() as patched:
            patched.setattr(dialect, "do_commit", fail)
            with pytest.raises(StoreError, match="the connection broke"):
                store.append([ev.NodeReady("a")])
        assert store.append([ev.NodeReady("a")])[0].sequence == 1
        assert [record.event for record in store.read()] == [ev.NodeReady("a")]

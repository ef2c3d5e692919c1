"""Of all coordinators that reach a PostgreSQL, the one that has the lease writes: `store/lease.py`."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store import lease
from dtfm.coordinator.store.database import open_engine
from dtfm.coordinator.store.record import AnotherWriter, Snapshot
from dtfm.coordinator.store.store import Store, StoreError
from tests import postgres

LEASE = 0.5


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    return postgres.database(tmp_path)


def test_one_that_is_stopped_while_another_takes_over_writes_nothing(store_url: str) -> None:
    with Store(store_url, write=True) as old:
        old.append([ev.NodeReady("a")])
        old.renew(LEASE)
        with Store(store_url, write=True, waits=True) as new:
            for write in (
                lambda: old.append([ev.NodeReady("b")]),
                lambda: old.keep(Snapshot(1, 1, "", "")),
                lambda: old.renew(LEASE),
            ):
                with pytest.raises(AnotherWriter, match="another coordinator has taken this run over"):
                    write()
            old.close()  # it has nothing to give up
            assert not new.was_reserve, "the other one renewed nothing while it waited"
            assert new.append([ev.NodeReady("c")])[0].sequence == 2
            assert [record.event for record in new.read()] == [ev.NodeReady("a"), ev.NodeReady("c")]
            assert not list(new.snapshots(until=2))


def test_a_write_in_progress_is_seen_by_whoever_takes_over(store_url: str) -> None:
    blocked = sa.text("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()")
    with Store(store_url, write=True) as old, ThreadPoolExecutor(1) as threads:
        old.renew(LEASE)
        reserves = list[Future[Store]]()

        def let_it_try(_: object, __: object, statement: str, *___: object) -> None:
            if statement.startswith("INSERT INTO events"):
                reserves.append(threads.submit(Store, store_url, write=True, waits=True))
                with open_engine(store_url, write=False).connect() as other:
                    while not reserves[0].done() and other.execute(blocked).scalar() is None:
                        other.rollback()

        sa.event.listen(old._engine, "before_cursor_execute", let_it_try)
        old.append([ev.NodeReady("a")])
        with reserves[0].result(30) as new:
            assert new.last == 1


def test_one_that_was_stopped_within_a_write_leaves_nothing_of_it_and_blocks_no_other(store_url: str) -> None:
    with Store(store_url, write=True) as old:
        old.renew(LEASE)

        def stop_within_a_write() -> None:
            with old._writing() as connection:
                connection.exec_driver_sql("INSERT INTO events VALUES (1, 0, 'half')")
                with Store(store_url, write=True, waits=True) as new:
                    assert new.append([ev.NodeReady("a")])[0].sequence == 1

        with pytest.raises(StoreError, match="idle-in-transaction"):
            stop_within_a_write()


def test_one_that_gave_the_lease_up_is_not_waited_for(store_url: str) -> None:
    with Store(store_url, write=True) as store:
        store.renew(3600)
    Store(store_url, write=True).close()


def test_while_the_lease_is_renewed_a_second_one_is_refused_and_a_reserve_waits(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals, given_up, looked = threading.Event(), threading.Event(), threading.Event()

    def pause(seconds: float) -> None:
        looked.set()
        time.sleep(seconds)

    monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
    with Store(store_url, write=True) as store, ThreadPoolExecutor(2) as threads:

        def renew() -> None:
            while not given_up.wait(LEASE / 10):
                store.renew(LEASE)
                renewals.set()
            store.close()

        renewing = threads.submit(renew)
        try:
            assert renewals.wait(10)
            reserve: Future[Store] = threads.submit(Store, store_url, write=True, waits=True)
            assert looked.wait(20)
            with pytest.raises(AnotherWriter, match=r"another coordinator writes to it; stop it, .*--reserve"):
                Store(store_url, write=True)
            assert not reserve.done()
            assert store.reserves() == 1, "the one that was refused does not wait"
        finally:
            given_up.set()
        renewing.result(10)
        with reserve.result(10) as taken:
            assert taken.was_reserve
            assert taken.reserves() == 0


def test_a_reserve_that_is_gone_counts_no_more_and_is_forgotten(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        pass

    def die(_: float) -> None:
        raise Killed

    with Store(store_url, write=True) as store:
        store.renew(3600)
        monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=time.monotonic, sleep=die))
        for _ in range(2):
            with pytest.raises(Killed):
                Store(store_url, write=True, waits=True)
            assert store.reserves() == 1
            with store._engine.begin() as connection:
                connection.exec_driver_sql("UPDATE reserves SET looked = looked - interval '11 seconds'")
                assert connection.exec_driver_sql("SELECT count(*) FROM reserves").scalar() == 1
            assert store.reserves() == 0


def test_a_file_has_no_reserves(tmp_path: Path) -> None:
    with Store(f"sqlite:///{tmp_path / 'dtfm.db'}", write=True) as store:
        assert store.reserves() is None


def test_a_reserve_says_once_that_its_database_is_away_and_outlives_that(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = queue.Queue[str]()

    def pause(seconds: float) -> None:
        happened.put("a pause")
        time.sleep(seconds)

    monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
    monkeypatch.setattr(lease.log, "warning", lambda text, *_: happened.put(text))
    with Store(store_url, write=True) as store, ThreadPoolExecutor(1) as threads:
        store.renew(3600)
        reserve: Future[Store] = threads.submit(Store, store_url, write=True, waits=True)
        postgres.server().stop()
        try:
            for use in (lambda: store.append([ev.NodeReady("a")]), store.reserves):
                with pytest.raises(StoreError):
                    use()
            while (said := happened.get(timeout=20)) == "a pause":
                pass
            assert said.startswith("the reserve cannot see whether it is needed")
            assert [happened.get(timeout=20) for _ in range(3)] == ["a pause"] * 3
        finally:
            postgres.server().start()
        assert store.append([ev.NodeReady("a")])[0].sequence == 1
        store.renew(LEASE)
        with reserve.result(30) as taken:
            assert taken.last == 1

"""What databases refuse, in words: `store/database.py`."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import errors

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.database import explained
from dtfm.coordinator.store.record import StoreAway
from dtfm.coordinator.store.store import Store, StoreError
from tests import postgres
from tests.cluster.ports import free_port


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'dtfm.db'}"


def test_a_second_coordinator_cannot_open_the_store(store_url: str) -> None:
    with Store(store_url, write=True):
        with pytest.raises(StoreError, match=r"another coordinator uses this store .*--store"):
            Store(store_url, write=True)
        with Store(store_url, write=False) as reader:
            assert list(reader.read()) == []
    Store(store_url, write=True).close()


def test_an_error_says_that_the_database_is_locked(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(store_url, write=True) as store:
        store.append([ev.NodeReady("a")])
        monkeypatch.setattr(store, "_engine", sa.create_engine(store_url, connect_args={"timeout": 0}))
        other = sa.create_engine(store_url).connect()
        other.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another process has locked it"):
            store.append([ev.NodeReady("b")])
        other.close()


def test_an_error_says_that_the_disk_is_full(store_url: str) -> None:
    with Store(store_url, write=True) as store:
        store.append([ev.NodeReady("a")])
        with store._engine.connect() as connection:
            connection.exec_driver_sql(
                "PRAGMA max_page_count = 1"
            )  # of this connection, which the pool hands out again
        with pytest.raises(StoreError, match="the disk is full; make room"):
            store.append([ev.NodeLeft("a", "x" * 100_000)])


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.DiskFull, StoreAway),
        (errors.TooManyConnections, StoreAway),
        (errors.AdminShutdown, StoreAway),
        (errors.CannotConnectNow, StoreAway),
        (errors.ConnectionFailure, StoreAway),
        (errors.DatabaseDropped, StoreError),
        (errors.InvalidPassword, StoreError),
        (errors.UndefinedTable, StoreError),
    ],
)
def test_a_server_may_speak_any_language(error: type[psycopg.Error], kind: type[StoreError]) -> None:
    with pytest.raises(StoreError) as explanation, explained("its name"):
        raise sa.exc.OperationalError("", {}, error("der Server sagt es auf Deutsch"))
    assert type(explanation.value) is kind


@pytest.mark.parametrize(
    ("store_url", "words"),
    [
        ("nonsense", "or a SQLAlchemy URL like sqlite:///dtfm.db"),
        ("nosuchdatabase://x", "give a path, or a SQLAlchemy URL"),
        ("mysql+pymysql://x/y", "give a path, or a SQLAlchemy URL"),
        ("sqlite:////nowhere/at/all/dtfm.db", "No such file or directory"),
    ],
)
def test_an_impossible_store_address_is_refused_with_its_reason(store_url: str, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        Store(store_url, write=True)


def test_a_driver_that_is_missing_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match=r"the database's driver is missing .* pip install .*\[postgres\]"):
        Store("postgresql://x/y", write=False)


def test_opening_a_store_to_read_creates_none(tmp_path: Path, store_url: str) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        Store(store_url, write=False)
    (tmp_path / "dtfm.db").write_bytes(b"no database at all, but long enough to be looked at" * 50)
    with pytest.raises(StoreError, match="is not a database"):
        Store(store_url, write=False)


def test_a_postgresql_that_is_not_there_or_holds_no_log_is_named_without_the_password(tmp_path: Path) -> None:
    url = f"postgresql+psycopg://me:secret@127.0.0.1:{free_port()}/runs"
    with pytest.raises(StoreError, match=r"store postgresql\+psycopg://me:\*\*\*@.*Connection refused") as problem:
        Store(url, write=True)
    assert "secret" not in str(problem.value)
    with pytest.raises(StoreError, match="it is not a store of dtfm"):
        Store(postgres.database(tmp_path), write=False)


def test_only_its_owner_may_read_the_file_and_those_beside_it(tmp_path: Path, store_url: str) -> None:
    with Store(store_url, write=True) as store:
        store.append([ev.NodeReady("a")])
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("dtfm.db", "dtfm.db-wal", "dtfm.db-shm", "dtfm.db.lock"), 0o600)

"""A backup is made while the coordinator runs, and `serve` goes on with a restored backup: `command/backup.py`."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.service.authority_key import authority_file, authority_key
from dtfm.coordinator.store.store import Store
from dtfm.protos.identity.private_files import write_private
from tests.coordinator.command.typed import Typed
from tests.coordinator.script import training
from tests.coordinator.serving import serving


@pytest.mark.usefixtures("in_sqlite")
async def test_the_log_and_the_key_of_a_coordinator_that_runs_come_back_as_they_were(
    tmp_path: Path, typed: Typed
) -> None:
    there, again = tmp_path / "backup", tmp_path / "again" / "dtfm.db"
    async with serving(tmp_path) as served, served.node("a"):
        await served.until(lambda: "a" in served.ledger.members)
        at = served.store.last
        told = json.loads(typed("backup", str(there), "--store", f"{tmp_path}/dtfm.db", "--json"))
        assert (told["event"], told["run"]) == ("backed_up", served.ledger.run["name"])
        await served.enrolled("later")
        written = list(served.store.read())
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in there.iterdir()} == {
        "dtfm.db": 0o600,
        "dtfm.authority.pem": 0o600,
    }
    typed("restore", str(there), "--store", str(again))
    with Store(f"sqlite:///{again}", write=True) as store:
        assert list(store.read()) == written[: told["events"]]
        assert told["events"] >= at
        assert store.append([ev.NodeReady("a")])[0].sequence == told["events"] + 1
    assert stat.S_IMODE(again.stat().st_mode) == 0o600
    key = authority_key(authority_file(f"sqlite:///{again}", ""))
    assert key == authority_key(authority_file(f"sqlite:///{tmp_path}/dtfm.db", ""))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "dtfm.db"
    with Store(f"sqlite:///{path}", write=True) as opened:
        opened.append(training("a", "b").whole_log)
    authority_key(authority_file(f"sqlite:///{path}", ""))
    return path


def test_neither_overwrites_anything(tmp_path: Path, store: Path, typed: Typed) -> None:
    there = tmp_path / "backup"
    typed("backup", str(there), "--store", str(store))
    before = {file: file.read_bytes() for file in [*there.iterdir(), store]}
    for command in ("backup", "restore"):
        assert "is there already, and would be lost" in typed(command, str(there), "--store", str(store), code=2)
    assert {file: file.read_bytes() for file in [*there.iterdir(), store]} == before


def test_what_sqlite_would_take_for_a_part_of_the_restored_log_is_in_the_way(
    tmp_path: Path, store: Path, typed: Typed
) -> None:
    """A process that was killed leaves this file beside its log."""
    there, again = tmp_path / "backup", tmp_path / "again" / "dtfm.db"
    typed("backup", str(there), "--store", str(store))
    again.parent.mkdir()
    (left := Path(f"{again}-wal")).write_bytes(b"of another log")
    assert f"{left} is there already" in typed("restore", str(there), "--store", str(again), code=2)
    assert not again.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("backup", "there", "--store", "nowhere.db"), "there is no store at nowhere.db"),
        (("restore", "there", "--store", "new.db"), "there is no store at there/dtfm.db"),
        (("backup", "there", "--store", "dtfm.db", "--authority", "x.pem"), "there is no key at x.pem"),
        (("backup", "there", "--store", "postgresql+psycopg://h/d"), "for PostgreSQL use pg_dump"),
    ],
)
def test_what_is_missing_is_named_and_nothing_is_left_behind(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in typed(*arguments, code=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["dtfm.authority.pem", "dtfm.db", "dtfm.db.lock"]


def test_a_store_that_cannot_be_read_leaves_no_half_of_a_backup(tmp_path: Path, store: Path, typed: Typed) -> None:
    store.write_bytes(store.read_bytes()[:5000])
    assert f"{store}: " in typed("backup", str(tmp_path / "there"), "--store", str(store), code=2)
    assert list((tmp_path / "there").iterdir()) == []


@pytest.fixture
def passphrase(tmp_path: Path) -> Path:
    path = tmp_path / "passphrase"
    write_private(path, b"correct horse battery\n")
    return path


def test_a_backup_with_a_passphrase_shows_nothing_and_comes_back(
    tmp_path: Path, store: Path, passphrase: Path, typed: Typed
) -> None:
    there, again = tmp_path / "backup", tmp_path / "again" / "dtfm.db"
    option = ("--passphrase-file", str(passphrase))
    told = json.loads(typed("backup", str(there), "--store", str(store), *option, "--json"))
    assert told["encrypted"]
    key = authority_file(f"sqlite:///{store}", "").read_bytes()
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in there.iterdir()} == {
        "dtfm.db.sealed": 0o600,
        "dtfm.authority.pem.sealed": 0o600,
    }
    for file in there.iterdir():
        assert b"SQLite" not in file.read_bytes()
        assert b"PRIVATE KEY" not in file.read_bytes()
    assert not list(store.parent.glob(f".{store.name}-*")), "what it was made from is deleted"
    assert "give the file with its passphrase" in typed("restore", str(there), "--store", str(again), code=2)
    typed("restore", str(there), "--store", str(again), *option)
    with Store(f"sqlite:///{again}", write=True) as opened, Store(f"sqlite:///{store}", write=False) as before:
        assert list(opened.read()) == list(before.read())
    assert authority_file(f"sqlite:///{again}", "").read_bytes() == key
    assert stat.S_IMODE(again.stat().st_mode) == 0o600


def test_another_passphrase_and_a_changed_file_open_nothing(
    tmp_path: Path, store: Path, passphrase: Path, typed: Typed
) -> None:
    there, again = tmp_path / "backup", tmp_path / "again" / "dtfm.db"
    typed("backup", str(there), "--store", str(store), "--passphrase-file", str(passphrase))
    write_private(tmp_path / "other", b"incorrect horse battery")
    write_private(tmp_path / "short", b"horse")
    for other, words in (("other", "another passphrase"), ("short", "at least 12"), ("none", "there is no file")):
        option = ("--passphrase-file", str(tmp_path / other))
        assert words in typed("restore", str(there), "--store", str(again), *option, code=2)
    sealed = there / "dtfm.authority.pem.sealed"
    sealed.write_bytes(sealed.read_bytes()[:-1] + b"x")
    option = ("--passphrase-file", str(passphrase))
    assert "it is damaged" in typed("restore", str(there), "--store", str(again), *option, code=2)
    assert not again.exists()
    assert not authority_file(f"sqlite:///{again}", "").exists()


def test_a_backup_without_a_passphrase_says_so(tmp_path: Path, store: Path, passphrase: Path, typed: Typed) -> None:
    there = str(tmp_path / "backup")
    assert "It is not encrypted: whoever can read it can act as the run's coordinator." in typed(
        "backup", there, "--store", str(store)
    )
    option = ("--passphrase-file", str(passphrase))
    assert "leave --passphrase-file out" in typed("restore", there, "--store", str(tmp_path / "x.db"), *option, code=2)

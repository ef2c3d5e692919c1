"""``dtfm-coordinator backup`` and ``restore``: the log, and the key that shows nodes that a coordinator is the run's."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from dtfm.coordinator.command.options import DEFAULT_STORE, Json, store_option

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the backup.", show_default=False)]
StoreFile = Annotated[str, store_option("The SQLite file of the event log.")]
Authority = Annotated[
    Path | None,
    typer.Option(help="File with the key of the run's authority. Default: beside the store, as for `serve`."),
]
Passphrase = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A file with the passphrase that encrypts the backup. Nobody can open the backup without it.",
    ),
]
LOG, KEY = "dtfm.db", "dtfm.authority.pem"
"""The files of a backup."""
SEALED = ".sealed"
"""Added to both names if the files are encrypted."""


def backup(
    folder: Folder,
    store: StoreFile = DEFAULT_STORE,
    authority: Authority = None,
    passphrase_file: Passphrase = None,
    json_lines: Json = False,
) -> None:
    """Copies the event log and the authority's key into a new folder, for its owner alone. The coordinator may run at the same
    time.

    Whoever can read the backup can act as the run's coordinator: give --passphrase-file, and it is encrypted. A log in
    PostgreSQL is backed up by pg_dump; copy the key's file too.
    """
    log, key = _places(store, authority)
    if passphrase_file is None:
        _copy(log, key, folder / LOG, folder / KEY)
        _tell("backed_up", folder / LOG, folder, json_lines, encrypted=False)
        return
    secret = _passphrase(passphrase_file)
    sealed_log, sealed_key = folder / f"{LOG}{SEALED}", folder / f"{KEY}{SEALED}"
    _check_free(sealed_log, sealed_key)
    _check_there(log)
    with tempfile.TemporaryDirectory(
        dir=log.parent, prefix=f".{log.name}-"
    ) as aside:  # of mode 0700, as safe as the log
        plain_log, plain_key = Path(aside, LOG), Path(aside, KEY)
        _copy(log, key, plain_log, plain_key)
        _seal(plain_log, sealed_log, secret)
        _seal(plain_key, sealed_key, secret)
        _tell("backed_up", plain_log, folder, json_lines, encrypted=True)


def restore(
    folder: Folder,
    store: StoreFile = DEFAULT_STORE,
    authority: Authority = None,
    passphrase_file: Passphrase = None,
    json_lines: Json = False,
) -> None:
    """Puts the event log and the authority's key of a backup where `serve` looks for them. Nothing is overwritten.

    Then `serve` goes on with the run, at the same address. Steps that were committed after the backup are trained again, from the
    state that nodes have of an earlier one.
    """
    log, key = _places(store, authority)
    sealed_log, sealed_key = folder / f"{LOG}{SEALED}", folder / f"{KEY}{SEALED}"
    if encrypted := sealed_log.exists():
        if passphrase_file is None:
            raise ValueError(f"{sealed_log} is encrypted; give the file with its passphrase by --passphrase-file")
        _check_free(log, key)
        secret = _passphrase(passphrase_file)
        content, its_key = _unsealed(sealed_log, secret), _unsealed(sealed_key, secret)
        from dtfm.protos.identity.private_files import write_private

        write_private(key, its_key)
        write_private(log, content)
    elif passphrase_file is not None:
        raise ValueError(f"{folder} has no {sealed_log.name}: it is not encrypted; leave --passphrase-file out")
    else:
        _copy(folder / LOG, folder / KEY, log, key)
    _tell("restored", log, log, json_lines, encrypted=encrypted)


def _places(store: str, authority: Path | None) -> tuple[Path, Path]:
    from dtfm.coordinator.service.authority_key import authority_file
    from dtfm.coordinator.store.database import sqlite_file

    if not (path := sqlite_file(store)):
        raise ValueError(
            "this works on SQLite files; for PostgreSQL use pg_dump and pg_restore, and copy the key's file"
        )
    return Path(path), authority or authority_file(store, "")


def _check_there(log: Path) -> None:
    from dtfm.coordinator.store.record import check_exists

    check_exists(str(log))


def _check_free(log: Path, key: Path) -> None:
    """Raises ValueError if a file is already there. SQLite would take the remains of another log for its own."""
    for there in (log, Path(f"{log}-wal"), Path(f"{log}-shm"), key):
        if there.exists():
            raise ValueError(f"{there} is there already, and would be lost; move it away, or name another place")


def _copy(log: Path, key: Path, to_log: Path, to_key: Path) -> None:
    """Copies the log and the key. SQLite copies the log as of one moment, even while another process writes it. Raises
    ValueError."""
    import sqlite3
    from contextlib import closing

    from dtfm.coordinator.store.record import in_words
    from dtfm.protos.identity.private_files import read_private, write_private

    _check_there(log)
    _check_free(to_log, to_key)
    try:
        secret = read_private(key)
    except FileNotFoundError:
        raise ValueError(f"there is no key at {key}; name the authority's file with --authority") from None
    part = to_log.with_name(f".{to_log.name}.part")
    write_private(part, b"")  # a mode of 0600
    try:
        with closing(sqlite3.connect(log, timeout=5)) as source, closing(sqlite3.connect(part)) as target:
            source.backup(target)
        write_private(to_key, secret)
        os.replace(part, to_log)
    except sqlite3.Error as error:
        raise ValueError(f"{log}: {in_words(str(error))}") from None
    finally:
        part.unlink(missing_ok=True)


def _passphrase(file: Path) -> bytes:
    """The passphrase in the file, without the end of its line. Raises ValueError."""
    from dtfm.coordinator.store.sealed import LEAST_PASSPHRASE
    from dtfm.protos.identity.private_files import read_private

    try:
        found = read_private(file).rstrip(b"\r\n")
    except FileNotFoundError:
        raise ValueError(f"there is no file {file} with a passphrase") from None
    if len(found) < LEAST_PASSPHRASE:
        raise ValueError(
            f"the passphrase in {file} has {len(found)} characters; it must have at least {LEAST_PASSPHRASE}"
        )
    return found


def _seal(plain: Path, sealed: Path, passphrase: bytes) -> None:
    from dtfm.coordinator.store.sealed import seal
    from dtfm.protos.identity.private_files import write_private

    write_private(sealed, seal(plain.read_bytes(), passphrase, plain.name))


def _unsealed(sealed: Path, passphrase: bytes) -> bytes:
    from dtfm.coordinator.store.sealed import unseal

    try:
        return unseal(sealed.read_bytes(), passphrase, sealed.name.removesuffix(SEALED))
    except OSError as error:
        raise ValueError(f"cannot read {sealed}: {error.strerror}") from None
    except ValueError as problem:
        raise ValueError(f"{sealed} {problem}") from None


def _tell(event: str, log: Path, where: Path, json_lines: bool, *, encrypted: bool) -> None:
    from dtfm.coordinator.store.store import Store
    from dtfm.coordinator.view.story_snapshot import story_of

    with Store(f"sqlite:///{log}", write=False) as store:
        ledger, last = story_of(store.snapshots(store.last), store.read).now.ledger, store.last
    run, step = ledger.run.get("name"), ledger.training.step
    if json_lines:
        told = {"event": event, "place": str(where), "run": run, "step": step, "events": last, "encrypted": encrypted}
        print(json.dumps(told))
    else:
        print(f"Run {run!r} after step {step:,} ({last:,} events) is in {where} now.")
        if event == "backed_up":
            is_open = "It is not encrypted: whoever can read it can act as the run's coordinator. --passphrase-file encrypts it."
            print("It is encrypted: keep the passphrase." if encrypted else is_open)

"""``dtfm-coordinator backup`` and ``restore``: the log, and the key by which nodes know the run."""

from __future__ import annotations

import json
import os
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
LOG, KEY = "dtfm.db", "dtfm.authority.pem"
"""What a backup consists of."""


def backup(
    folder: Folder, store: StoreFile = DEFAULT_STORE, authority: Authority = None, json_lines: Json = False
) -> None:
    """Copies the event log and the authority's key into a new folder, for its owner alone. The coordinator may run meanwhile.

    Whoever has the backup can act as the run's coordinator. A log in PostgreSQL is backed up by pg_dump; copy the key's file
    beside it.
    """
    log, key = _places(store, authority)
    _copy(log, key, folder / LOG, folder / KEY)
    _tell("backed_up", folder / LOG, folder, json_lines)


def restore(
    folder: Folder, store: StoreFile = DEFAULT_STORE, authority: Authority = None, json_lines: Json = False
) -> None:
    """Puts the event log and the authority's key of a backup where `serve` looks for them. Nothing is overwritten.

    Then `serve` goes on with the run, at the same address. Steps that were committed after the backup are trained again, from the
    state that nodes have of an earlier one.
    """
    log, key = _places(store, authority)
    _copy(folder / LOG, folder / KEY, log, key)
    _tell("restored", log, log, json_lines)


def _places(store: str, authority: Path | None) -> tuple[Path, Path]:
    from dtfm.coordinator.service.authority_key import authority_file
    from dtfm.coordinator.store.database import sqlite_file

    if not (path := sqlite_file(store)):
        raise ValueError(
            "this works on SQLite files; for PostgreSQL use pg_dump and pg_restore, and copy the key's file"
        )
    return Path(path), authority or authority_file(store, "")


def _copy(log: Path, key: Path, to_log: Path, to_key: Path) -> None:
    """SQLite copies the log as of one moment, whoever writes to it. Raises ValueError."""
    import sqlite3
    from contextlib import closing

    from dtfm.coordinator.store.record import check_exists, in_words
    from dtfm.protos.identity.private_files import read_private, write_private

    check_exists(str(log))
    # SQLite would take what another log has left for its own.
    for there in (to_log, Path(f"{to_log}-wal"), Path(f"{to_log}-shm"), to_key):
        if there.exists():
            raise ValueError(f"{there} is there already, and would be lost; move it away, or name another place")
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


def _tell(event: str, log: Path, where: Path, json_lines: bool) -> None:
    from dtfm.coordinator.store.store import Store
    from dtfm.coordinator.view.story_snapshot import story_of

    with Store(f"sqlite:///{log}", write=False) as store:
        ledger, last = story_of(store.snapshots(store.last), store.read).now.ledger, store.last
    run, step = ledger.run.get("name"), ledger.training.step
    if json_lines:
        print(json.dumps({"event": event, "place": str(where), "run": run, "step": step, "events": last}))
    else:
        print(f"Run {run!r} after step {step:,} ({last:,} events) is in {where} now.")

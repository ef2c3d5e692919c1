"""The key of the run's authority. It is a file of its own: readers of the log cannot certify anybody."""

from __future__ import annotations

from pathlib import Path

from dtfm.coordinator.store.database import sqlite_file
from dtfm.protos.identity.credentials import is_key, make_key
from dtfm.protos.identity.private_files import read_private, state_folder, write_private

STORE_SUFFIXES = (".db", ".sqlite", ".sqlite3")


def authority_file(store_url: str, run_id: str) -> Path:
    """Where the key is unless the operator names another file: beside an SQLite store, and for any other store in the user's
    state folder. Only one of STORE_SUFFIXES is left out of a store's name. So two stores of one folder have two keys, unless
    their names differ in the suffix alone."""
    if path := sqlite_file(store_url):
        store = Path(path)
        return store.with_name(f"{store.stem if store.suffix in STORE_SUFFIXES else store.name}.authority.pem")
    return state_folder() / "authorities" / f"{run_id}.pem"


def authority_key(path: Path) -> bytes:
    """The key in ``path`` (PEM). Makes the key if there is no file. Raises ValueError."""
    try:
        key = read_private(path)
    except FileNotFoundError:
        key = make_key()
        write_private(path, key)
    if not is_key(key):
        raise ValueError(f"{path} holds no P-256 private key (PEM); name the authority's file with --authority")
    return key

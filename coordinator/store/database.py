"""The databases that hold a log: how to connect to one, and what its errors mean."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from dtfm.coordinator.store.record import AnotherWriter, StoreAway, StoreError, check_exists, in_words
from dtfm.installed import install_line

_POSTGRESQL = {
    "connect_timeout": "5",  # seconds, like the next two: a server that does not answer counts as gone
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",  # milliseconds
    "options": "-c idle_in_transaction_session_timeout=5s",  # a coordinator that is stopped within a write blocks no other
}
"""Default settings of a connection. The URL's own settings take precedence."""
_STATES_AWAY = ("08", "53", "57P")
"""The beginnings of the SQLSTATE of a PostgreSQL that cannot be used for now (its manual's appendix A): its connection, its
resources, its operator."""
_DROPPED = "57P04"
"""The SQLSTATE of a database that is gone for good."""
_AWAY = (
    "No space left on device",
    "Is the server running",  # libpq adds it where nobody listens
    "is starting up",
    "is shutting down",
    "in recovery mode",
    "server closed the connection",
    "timeout expired",
    "could not receive data from server",
    "Temporary failure in name resolution",
    "No route to host",
    "Network is unreachable",
)
"""Parts of errors that have no SQLSTATE, mostly libpq's while it connects, of a database that cannot be used for now."""
_SECRET = frozenset(("scram_client_key", "scram_server_key"))
"""Further secrets of libpq, beside the names that contain "password" or "secret"."""


def open_engine(url: str, *, write: bool) -> sa.Engine:
    """Opens the engine, and connects to nothing yet. ``write``: if an SQLite file is missing, makes it for its owner alone.
    Raises StoreError."""
    try:
        parsed = sa.make_url(url)
        _check_no_secret(parsed)
        if parsed.get_backend_name() == "postgresql":
            options = {key: value for key, value in _POSTGRESQL.items() if key not in parsed.query}
            return sa.create_engine(
                parsed.set(drivername="postgresql+psycopg"), connect_args=options, pool_pre_ping=True
            )
        if parsed.get_backend_name() != "sqlite":
            raise exc.ArgumentError("dtfm knows SQLite and PostgreSQL")
        if (path := sqlite_file(parsed)) and not write:
            check_exists(path)
        elif path:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives the files beside it the same mode
        engine = sa.create_engine(parsed, connect_args={"timeout": 5})
        if write:
            sa.event.listen(engine, "connect", _durable)
        return engine
    except exc.ArgumentError as error:
        raise StoreError(
            f"this is no store: {error}; give a path, or a SQLAlchemy URL like sqlite:///dtfm.db or "
            "postgresql+psycopg://USER@HOST/DATABASE"
        ) from None
    except ImportError as error:
        raise StoreError(f"the database's driver is missing ({error}): {install_line('postgres')}") from None
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}; give another file with --store") from None


def _check_no_secret(url: sa.URL) -> None:
    """Raises StoreError for a secret in the query, which errors and the log would show with the rest of the URL."""
    for key in url.query:
        if key.lower() in _SECRET or any(part in key.lower() for part in ("password", "secret")):
            shown = url.set(query={}).render_as_string()
            raise StoreError(
                f"the store {shown} has {key} in its URL after the '?', where errors and logs would show it; give a password as "
                "USER:PASSWORD@HOST, in PGPASSWORD, or in a file that PGPASSFILE names"
            )


def sqlite_file(url: str | sa.URL) -> str:
    """The path of the SQLite file. Empty: the database is in memory, or not SQLite."""
    parsed = sa.make_url(url)
    path = parsed.database if parsed.get_backend_name() == "sqlite" else None
    return "" if path in (None, ":memory:") else str(path)


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turns an error of the database of the store ``name`` into a StoreError."""
    try:
        yield
    except exc.SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error
        text = " ".join(str(cause).split())
        if isinstance(error, exc.IntegrityError):
            kind: type[StoreError] = AnotherWriter
        else:
            kind = StoreAway if _is_away(cause, text) else StoreError
        raise kind(f"store {name}: {in_words(text)}") from None


def _is_away(cause: BaseException, text: str) -> bool:
    state: str | None = getattr(cause, "sqlstate", None)
    if state is not None:
        return state.startswith(_STATES_AWAY) and state != _DROPPED
    full = getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return full or any(part in text for part in _AWAY)


def _durable(connection: Any, _record: object) -> None:
    """Makes commits survive a power cut, and lets readers work beside the writer. PostgreSQL does both by itself."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA secure_delete=ON")

"""Decides who may write a log that several machines reach: the coordinator that has the lease. A reserve takes the lease when
it has run out.

The lease is a row in the database. A coordinator that takes the lease raises ``epoch``, and each write asks for the writer's
own epoch. A coordinator may be stopped for a while, and wake up when another has the lease: then its writes fail. The holder
raises ``beats`` with each write, and with `hold` between writes. The lease has run out when neither has changed for
``seconds``, by the clock of the coordinator that waits for it. So no two clocks have to agree.
"""

from __future__ import annotations

import logging
import secrets
import time
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from dtfm.coordinator.store.database import explained
from dtfm.coordinator.store.record import AnotherWriter, StoreError
from dtfm.protos.connection import DEFAULT_LEASE

log = logging.getLogger(__name__)

LOOKS = 20
"""How often a reserve looks at the lease within its ``seconds``."""
LONGEST_PAUSE_SECONDS = 0.5
"""The longest time between two looks."""

RESERVE_SECONDS = 10.0
"""A reserve whose last look is older than this, by the database's clock, is gone."""

METADATA = sa.MetaData()
_LEASE = sa.Table(
    "lease",
    METADATA,
    sa.Column("row", sa.Integer, primary_key=True, autoincrement=False),  # always 1, so that there is one
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("beats", sa.Integer, nullable=False),
    sa.Column("seconds", sa.Float, nullable=False),  # 0: given up
)

_RESERVES = sa.Table(
    "reserves",
    METADATA,
    sa.Column("name", sa.String(32), primary_key=True),  # drawn by each
    sa.Column("looked", sa.DateTime(timezone=True), nullable=False),
)
_IS_THERE = _RESERVES.c.looked > sa.func.now() - timedelta(seconds=RESERVE_SECONDS)


def take(engine: sa.Engine, name: str, *, waits: bool) -> tuple[int, bool]:
    """Takes the lease of the store ``name`` when it has run out. Returns its epoch, and whether another coordinator has renewed
    it or given it up during the wait. Makes missing tables. ``waits``: as long as another coordinator renews the lease, and
    while the database is away. Raises StoreError."""
    seen: sa.Row[Any] | None = None
    since, pause, is_away, waited, own_name = 0.0, LONGEST_PAUSE_SECONDS, False, False, secrets.token_hex(16)
    while True:
        try:
            with explained(name), engine.begin() as connection:
                if seen is None:
                    METADATA.create_all(connection)
                row = connection.execute(sa.select(_LEASE)).one_or_none()
                if row is None:
                    connection.execute(sa.insert(_LEASE).values(row=1, epoch=1, beats=0, seconds=DEFAULT_LEASE))
                    return 1, False
                if row != seen:
                    if seen is not None and not waits:
                        fix = "stop it, let this one wait with --reserve, or give this one another store with --store"
                        raise AnotherWriter(f"store {name}: another coordinator writes to it; {fix}")
                    waited = waited or seen is not None
                    seen, since, pause = row, time.monotonic(), min(row.seconds / LOOKS, LONGEST_PAUSE_SECONDS)
                if time.monotonic() - since >= row.seconds:
                    unchanged = (_LEASE.c.epoch == row.epoch) & (_LEASE.c.beats == row.beats)
                    own = {"epoch": row.epoch + 1, "seconds": row.seconds or DEFAULT_LEASE}
                    if connection.execute(sa.update(_LEASE).where(unchanged).values(own)).rowcount:
                        connection.execute(sa.delete(_RESERVES).where(_RESERVES.c.name == own_name))
                        return int(row.epoch) + 1, waited
                if waits:
                    _note(connection, own_name)
        except AnotherWriter:
            raise
        except StoreError as error:
            if not waits:
                raise
            if not is_away:
                log.warning("the reserve cannot see whether it is needed, and goes on trying: %s", error)
            seen, is_away = None, True
        else:
            is_away = False
        time.sleep(pause)


def reserves(connection: sa.Connection) -> int:
    """The number of coordinators that wait for the lease."""
    return connection.execute(sa.select(sa.func.count()).select_from(_RESERVES).where(_IS_THERE)).scalar_one()


def _note(connection: sa.Connection, reserve: str) -> None:
    """Notes that this coordinator waits. Forgets the ones that are gone."""
    looked = sa.update(_RESERVES).where(_RESERVES.c.name == reserve).values(looked=sa.func.now())
    if not connection.execute(looked).rowcount:
        connection.execute(sa.delete(_RESERVES).where(~_IS_THERE))
        connection.execute(sa.insert(_RESERVES).values(name=reserve, looked=sa.func.now()))


def hold(connection: sa.Connection, epoch: int, **changes: float) -> None:
    """Renews the lease. Nobody takes it before this transaction ends. Raises AnotherWriter if the lease's epoch is another."""
    renewed = sa.update(_LEASE).where(_LEASE.c.epoch == epoch).values(beats=_LEASE.c.beats + 1, **changes)
    if not connection.execute(renewed).rowcount:
        raise AnotherWriter("another coordinator has taken this run over; this one writes nothing more, and ends")

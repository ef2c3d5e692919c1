"""Options that several commands share, and how an event is printed."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:  # every command's --help imports this module
    from dtfm.coordinator.store.record import Record

DEFAULT_STORE = "dtfm.db"


def store_url(text: str) -> str:
    """The SQLAlchemy URL of the store that ``text`` names: a URL, or the path of an SQLite file. Empty stays empty."""
    return text if not text or "://" in text else f"sqlite:///{text}"


def store_option(help: str) -> Any:
    """An option ``--store``, which means the same in every command."""
    return typer.Option("--store", metavar="PATH|URL", callback=store_url, help=help)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line, for scripts.")]
Where = Annotated[
    str,
    typer.Argument(
        metavar="INVITATION|ADDRESS",
        help="An invitation, or a file with one; later HOST:PORT of the coordinator will do. Default: the run of "
        "this folder, or else the one that is up; with several it asks.",
    ),
]
StoreUrl = Annotated[
    str, store_option("Read this event log (an SQLite file, or a SQLAlchemy URL) instead of asking a coordinator.")
]
RunFilePath = Annotated[
    Path | None,
    typer.Argument(metavar="RUN.toml", help="The run file (docs/run-file.md). Default: every key's default."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log to standard error; print every event.")]


async def log_of(where: str, store: str, *, after: int = 0, follow: bool = False) -> AsyncIterator[Record]:
    """Yields the event log from sequence number ``after`` on. It comes from the ``store``, if one is given, and then is not
    followed; otherwise from the coordinator (see client.records). Raises ValueError."""
    if store:
        from dtfm.coordinator.store.record import read_log

        for record in read_log(store, after):
            yield record
        return
    from dtfm.coordinator.command.client import records

    async for record in records(where, after=after, follow=follow):
        yield record


def print_record(record: Record, *, json_lines: bool, all_events: bool = True) -> None:
    """``all_events``: also prints events that people need not know about."""
    if json_lines:
        print(json.dumps(record.to_json()), flush=True)
        return
    from dtfm.coordinator.view.for_people import is_for_people

    if all_events or is_for_people(record.event):
        at = time.strftime("%H:%M:%S", time.localtime(record.time))
        print(f"{at}  {record.event.narrate()}", flush=True)

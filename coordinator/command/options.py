"""Options that several commands share, and how an event is printed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from dtfm.coordinator.log.store import Record
from dtfm.coordinator.view.published import published

DEFAULT_STORE = "sqlite:///dtfm.db"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line, for scripts.")]
Where = Annotated[
    str,
    typer.Argument(
        metavar="INVITATION|ADDRESS",
        help="An invitation, or a file with one; later HOST:PORT of the coordinator will do. Default: the coordinator that was "
        "used or started last on this machine.",
    ),
]
StoreUrl = Annotated[
    str, typer.Option("--store", help="Read this event log (a SQLAlchemy URL) instead of asking a coordinator.")
]
RunFilePath = Annotated[
    Path | None,
    typer.Argument(metavar="[RUN.toml]", help="The run file (docs/run-file.md). Default: every key's default."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log to standard error.")]


def print_record(record: Record, *, json_lines: bool) -> None:
    if json_lines:
        print(json.dumps(published(record).to_json()), flush=True)
    else:
        at = time.strftime("%H:%M:%S", time.localtime(record.time))
        print(f"{at}  {record.event.narrate()}", flush=True)

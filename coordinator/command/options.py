"""What several commands share: options, the token, how a record is printed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from dtfm.coordinator.log.store import Record
from dtfm.coordinator.view.narration import narrate

DEFAULT_ADDRESS = "127.0.0.1:7400"
DEFAULT_STORE = "sqlite:///dtfm.db"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File that holds the run's token; else DTFM_TOKEN in the environment; without either, everybody may come."
    ),
]
Address = Annotated[str, typer.Argument(metavar="[ADDRESS]", help="The coordinator's HOST:PORT.")]
StoreUrl = Annotated[str, typer.Option("--store", help="Read this event log (a SQLAlchemy URL) instead of asking.")]
RunFilePath = Annotated[Path | None, typer.Argument(metavar="[RUN.toml]", help="Left out: the demo's defaults.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, to standard error.")]


def read_token(path: Path | None) -> str:
    """The run's token, from ``path`` or the environment; empty: there is none. Raises ValueError."""
    if path is None:
        return os.environ.get("DTFM_TOKEN", "").strip()
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the token from {path}: {error}") from None
    if not token or len(token) > 512 or not token.isascii() or not token.isprintable():
        raise ValueError(f"{path} holds no token; put 1 to 512 printable characters into it")
    return token


def print_record(record: Record, *, json_lines: bool) -> None:
    if json_lines:
        print(json.dumps(record.to_json()), flush=True)
    else:
        at = time.strftime("%H:%M:%S", time.localtime(record.time))
        print(f"{at}  {narrate(record.event)}", flush=True)

"""Options that several commands share, how the token is read, and how an event is printed."""

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

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line, for scripts.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the run's token. Default: DTFM_TOKEN in the environment. Without a token anybody can join."
    ),
]
Address = Annotated[str, typer.Argument(metavar="[ADDRESS]", help="HOST:PORT of the coordinator.")]
StoreUrl = Annotated[
    str, typer.Option("--store", help="Read this event log (a SQLAlchemy URL) instead of asking a coordinator.")
]
RunFilePath = Annotated[
    Path | None,
    typer.Argument(metavar="[RUN.toml]", help="The run file (docs/run-file.md). Default: every key's default."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log to standard error.")]


def read_token(path: Path | None) -> str:
    """The run's token, from the file ``path`` or from DTFM_TOKEN in the environment; empty when there is none.

    Raises ValueError when the file cannot be read or holds no token.
    """
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

"""Options that several commands of `dtfm-node` share, the log, and how a mistake is told."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, TextIO

import typer

from dtfm.protos.printable import JsonFormatter, PrintableFormatter, printable_lines

InvitationArgument = Annotated[
    str,
    typer.Argument(
        metavar="INVITATION|ADDRESS",
        envvar="DTFM_INVITATION",
        help="What `dtfm-coordinator invite` printed, or a file with it. It is needed once. Later HOST:PORT will do, or "
        "nothing, for the coordinator that was used or started last on this machine. Without any, the runs on the "
        "local network are listed, and it is asked for.",
        show_envvar=True,
    ),
]

look = partial(typer.Option, rich_help_panel="Looking into it")
Verbose = Annotated[bool, look("--verbose", "-v", help="Log every message.")]
Json = Annotated[bool, look("--json", help="Log JSON objects, with run, node, generation and step.")]


@contextmanager
def mistakes() -> Iterator[None]:
    """A context that treats a ValueError as the user's mistake: it tells the mistake, and the command exits with 2."""
    try:
        yield
    except ValueError as mistake:
        print(printable_lines(str(mistake)), file=sys.stderr)
        raise typer.Exit(2) from None


class ToStderr(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr at each record: a changing line, or a label, may have replaced sys.stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr(verbose: bool, json: bool) -> None:
    handler = logging.StreamHandler() if json else ToStderr()
    handler.setFormatter(JsonFormatter() if json else PrintableFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("dtfm").setLevel(logging.DEBUG if verbose else logging.INFO)

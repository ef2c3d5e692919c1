"""``dtfm-coordinator serve``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from dtfm.coordinator.command.background import announced
from dtfm.coordinator.command.options import DEFAULT_STORE, Json, RunFilePath, Verbose, store_option
from dtfm.protos import DEFAULT_ADDRESS


def serve(
    run_file: RunFilePath = None,
    listen: Annotated[
        str,
        typer.Option(help="HOST:PORT to listen on. 0.0.0.0:7400 lets other machines join; port 0 picks a free port."),
    ] = DEFAULT_ADDRESS,
    store: Annotated[
        str, store_option("The event log (an SQLite file, or a SQLAlchemy URL), created when missing.")
    ] = DEFAULT_STORE,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the store, or else from the newest checkpoint.")
    ] = False,
    start_or_resume: Annotated[
        bool,
        typer.Option(
            "--start-or-resume",
            help="Go on if the store holds a run, else start one: for containers and services, whose command stays the same.",
        ),
    ] = False,
    authority: Annotated[
        Path | None,
        typer.Option(
            help="File with the key of the run's authority, made when missing. Default: beside an SQLite store (dtfm.db: "
            "dtfm.authority.pem), else in ~/.local/state/dtfm."
        ),
    ] = None,
    advertise: Annotated[
        list[str] | None,
        typer.Option(
            help="HOST[:PORT] at which others reach this coordinator, for invitations (may be given several times). Default: "
            "the addresses of this machine's interfaces."
        ),
    ] = None,
    invitation_file: Annotated[
        Path | None,
        typer.Option(
            help="Write the first invitation to this file (mode 0600) instead of printing it, for nodes on the same disk; what "
            "is printed, a container keeps in its log."
        ),
    ] = None,
    health: Annotated[
        Path | None,
        typer.Option(
            help="The folder for a socket on which this process answers how it is: `python -m dtfm.protos.health` asks."
        ),
    ] = None,
    announce: Annotated[
        bool, typer.Option(help="Tell the local network of this run (zeroconf), unless it listens on loopback alone.")
    ] = True,
    json_lines: Json = False,
    verbose: Verbose = False,
) -> None:
    """Coordinates one run until it is over.

    Prints an invitation for nodes, then every tenth step and what else a person must know. The user who runs it is an operator:
    the other commands, and nodes on this machine, need no invitation. Exit codes: 0 the run finished, 1 it failed or was
    stopped, 2 bad input.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if resume and start_or_resume:
        raise ValueError("--resume and --start-or-resume exclude each other; give one of them")
    with announced("Loading the coordinator"):
        from dtfm.coordinator.command.serving import Paths, serve_run
    goes_on = None if start_or_resume else resume
    paths = Paths(authority, invitation_file, health)
    raise typer.Exit(serve_run(store, run_file, goes_on, listen, advertise or [], paths, announce, json_lines, verbose))

"""``dtfm-coordinator serve``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from dtfm.coordinator.command.background import announced
from dtfm.coordinator.command.options import DEFAULT_STORE, Json, RunFilePath, Verbose, store_option
from dtfm.coordinator.web import DEFAULT_PAGE
from dtfm.protos import DEFAULT_ADDRESS
from dtfm.protos.printable import JsonFormatter, PrintableFormatter


def serve(
    run_file: RunFilePath = None,
    listen: Annotated[
        str,
        typer.Option(
            help="HOST:PORT to listen on. 0.0.0.0:7400 lets other machines join; port 0 picks a free port. Default: where the "
            f"run in the store was served last, else {DEFAULT_ADDRESS}."
        ),
    ] = "",
    web: Annotated[
        str,
        typer.Option(
            help=f"HOST:PORT of this machine for the web page that shows the run. Default: {DEFAULT_PAGE}, or another port where "
            "that one is taken. Elsewhere than on loopback, it asks for a viewer's link (invite --role viewer)."
        ),
    ] = "",
    page_url: Annotated[
        str,
        typer.Option(
            help="Where others open the page, if a proxy passes it on, like https://run.example.org/. The page then asks for a "
            "viewer's link on loopback, too."
        ),
    ] = "",
    no_page: Annotated[bool, typer.Option("--no-page", help="Serve no web page.")] = False,
    metrics: Annotated[
        str,
        typer.Option(
            help="HOST:PORT where /metrics is served too, for a Prometheus elsewhere. Whoever reaches it reads the figures and "
            "nodes' names."
        ),
    ] = "",
    store: Annotated[
        str,
        store_option(
            "The event log, created when missing: an SQLite file, or postgresql+psycopg://USER@HOST/DATABASE (its password in "
            "~/.pgpass or PGPASSWORD, as arguments show in process lists)."
        ),
    ] = DEFAULT_STORE,
    new: Annotated[
        bool,
        typer.Option(
            "--new",
            help="Start over: an SQLite store that holds a run, and the run's checkpoints on this disk, get other names first.",
        ),
    ] = False,
    reserve: Annotated[
        bool,
        typer.Option(
            "--reserve",
            help="Wait until no other coordinator serves the run in this store, and take over. Needs PostgreSQL, and --authority "
            "with the same key; invitations carry the addresses of both if each is given --advertise for both.",
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
            help="HOST[:PORT] where others reach this coordinator, for invitations (may be given several times). Default: "
            "what the store remembers, else the addresses of this machine's interfaces."
        ),
    ] = None,
    invitation_file: Annotated[
        Path | None,
        typer.Option(
            help="Write the first invitation to this file (mode 0600) instead of printing it, for nodes on the same disk. A "
            "container keeps printed lines in its log."
        ),
    ] = None,
    exit_when_over: Annotated[
        bool,
        typer.Option(
            "--exit-when-over",
            help="End with the run, for scripts and containers. Otherwise a run that is complete is served on, and nodes that "
            "come back are told, until Ctrl-C.",
        ),
    ] = False,
    announce: Annotated[
        bool | None,
        typer.Option(
            "--announce/--no-announce",
            help="Whether the local network is told of this run (multicast DNS), so that dtfm-node join finds it, and finds it "
            "again at a new address. Nobody joins without an invitation. Default: where it listens beyond loopback.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,  # so that the environment has it as DTFM_JSON
    verbose: Verbose = False,
) -> None:
    """Coordinates one run until it is over: starts it, or goes on with the run in the store.

    Prints an invitation for nodes, then every tenth step and other events that a person must know. The user who runs it is an
    operator: the other commands, and nodes on this machine, need no invitation. Exit codes: 0 the run is complete, or
    `dtfm-coordinator stop` ended it; 1 it failed, or this process was interrupted before; 2 bad input.
    """
    handler = logging.StreamHandler()
    lines = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(JsonFormatter() if json else PrintableFormatter(lines))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])
    with announced("Loading the coordinator"):
        from dtfm.coordinator.command.serving import Serving, serve_run
        from dtfm.coordinator.web.serving import read_page_url
    if web and no_page:
        raise ValueError("--web says where the page is, but --no-page turns it off; leave one of them out")
    if page_url and no_page:
        raise ValueError(
            "--page-url says where others open the page, but --no-page turns it off; leave one of them out"
        )
    page, stays = None if no_page else web, not exit_when_over
    files = authority, invitation_file
    options = Serving(
        listen, page, read_page_url(page_url), metrics, advertise or [], *files, announce, json, verbose, stays
    )
    raise typer.Exit(serve_run(store, run_file, new, reserve, options))

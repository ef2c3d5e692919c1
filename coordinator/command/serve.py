"""``dtfm-coordinator serve`` and ``token``."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import sys
from typing import Annotated

import typer

from dtfm.coordinator.command.options import (
    DEFAULT_ADDRESS,
    DEFAULT_STORE,
    Json,
    RunFilePath,
    TokenFile,
    Verbose,
    print_record,
    read_token,
)
from dtfm.coordinator.config.run_file import RunFile, read_run_file
from dtfm.coordinator.log.store import Store
from dtfm.coordinator.service.server import Server
from dtfm.coordinator.service.startup import open_run, serve_until_over
from dtfm.protos.connection import read_address

SHORTEST_TOKEN = 16
"""The length of the shortest token that is hard to guess, in characters."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts that only this machine reaches."""


def token(json_lines: Json = False) -> None:
    """Draws a random token for a run.

    Set it as DTFM_TOKEN for the coordinator and for every node: only nodes with the same token can join.
    """
    drawn = secrets.token_urlsafe(24)
    print(json.dumps({"token": drawn}) if json_lines else drawn)


def serve(
    run_file: RunFilePath = None,
    listen: Annotated[
        str,
        typer.Option(help="HOST:PORT to listen on. 0.0.0.0:7400 lets other machines join; port 0 picks a free port."),
    ] = DEFAULT_ADDRESS,
    store: Annotated[str, typer.Option(help="The event log (a SQLAlchemy URL), created when missing.")] = DEFAULT_STORE,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the store, or else from the newest checkpoint.")
    ] = False,
    token_file: TokenFile = None,
    json_lines: Json = False,
    verbose: Verbose = False,
) -> None:
    """Coordinates one run until it is over.

    Prints the command that nodes join with, then every event. Exit codes: 0 the run finished, 1 it failed or was stopped, 2 bad
    input.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    host, port = read_address(listen)
    run = read_run_file(run_file) if run_file is not None or not resume else None
    token = read_token(token_file)
    if warning := weakness(token, host):
        print(f"Warning: {warning} Draw one: dtfm-coordinator token", file=sys.stderr, flush=True)
    with Store(store, write=True) as opened:
        raise typer.Exit(asyncio.run(_serve(opened, run, resume, host, port, token, json_lines)))


async def _serve(
    store: Store, run: RunFile | None, resume: bool, host: str, port: int, token: str, json_lines: bool
) -> int:
    state, events = open_run(store, run, resume=resume)
    server = Server(state, store, token)
    server.on_event(lambda record: print_record(record, json_lines=json_lines))
    port = await server.listen(host, port)
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if json_lines:
        print(json.dumps({"event": "listening", "address": shown}), flush=True)
    else:
        print(f"Run {state.run.name!r}, listening on {shown}. To take part, on each machine:")
        print(f"    dtfm-node join {_reachable(host)}:{port}", flush=True)
        if host in LOOPBACK:
            print(f"  (machines other than this one need: serve --listen 0.0.0.0:{port})", flush=True)
    return await serve_until_over(server, events)


def weakness(token: str, host: str) -> str:
    """A sentence on what is wrong with ``token`` for a server that listens on ``host``; empty when nothing is."""
    if not token and host not in LOOPBACK:
        return f"without a token anybody who reaches {host} can join this run, or impersonate its coordinator."
    if 0 < len(token) < SHORTEST_TOKEN:
        return f"anybody who reaches this coordinator can guess a token of {len(token)} characters."
    return ""


def _reachable(host: str) -> str:
    """The host to type on another machine to reach a server that listens on ``host``."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host

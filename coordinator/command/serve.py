"""``dtfm-coordinator serve``."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dtfm.coordinator.command.options import (
    DEFAULT_STORE,
    Json,
    RunFilePath,
    Verbose,
    print_record,
)
from dtfm.coordinator.config.run_file import RunFile, read_run_file
from dtfm.coordinator.log.events import Revoked
from dtfm.coordinator.log.store import Store
from dtfm.coordinator.service.addresses import EVERYWHERE, LOOPBACK, public_addresses
from dtfm.coordinator.service.announcing import announcing
from dtfm.coordinator.service.authority_key import authority_file, authority_key
from dtfm.coordinator.service.first_access import FIRST_SECONDS, FIRST_USES, first_invitation, local_operator
from dtfm.coordinator.service.server import Server
from dtfm.coordinator.service.startup import open_run, serve_until_over
from dtfm.protos.connection import read_address
from dtfm.protos.enrolment import DEFAULT_ADDRESS
from dtfm.protos.health import answering
from dtfm.protos.invitation import MOST_ADDRESSES, MOST_CHARACTERS, PREFIX, Invitation, read_invitation
from dtfm.protos.places import local_places
from dtfm.protos.private_files import read_private, write_private


@dataclass(frozen=True, slots=True)
class Paths:
    """What the operator named, beside the store: two files, and the folder for the health socket. None: the usual file for the
    authority's key, and nothing for the others."""

    authority: Path | None
    invitation: Path | None
    health: Path | None


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

    Prints an invitation for nodes, then every event. The user who runs it is an operator: the other commands, and nodes on this
    machine, need no invitation. Exit codes: 0 the run finished, 1 it failed or was stopped, 2 bad
    input.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    host, port = read_address(listen)
    if resume and start_or_resume:
        raise ValueError("--resume and --start-or-resume exclude each other; give one of them")
    goes_on = None if start_or_resume else resume
    run = read_run_file(run_file) if run_file is not None or goes_on is False else None
    paths = Paths(authority, invitation_file, health)
    with Store(store, write=True) as opened:
        raise typer.Exit(
            asyncio.run(_serve(opened, run, goes_on, host, port, advertise or [], paths, announce, json_lines))
        )


async def _serve(
    store: Store,
    run: RunFile | None,
    resume: bool | None,
    host: str,
    port: int,
    advertised: list[str],
    paths: Paths,
    announce: bool,
    json_lines: bool,
) -> int:
    old = None if paths.invitation is None else _written_before(paths.invitation)
    state, events = open_run(store, run, resume=resume)
    begun = len(events)
    key = authority_key(paths.authority or authority_file(store.url, state.ledger.run_id))
    server = Server(state, store, key)
    server.on_event(lambda record: print_record(record, json_lines=json_lines))
    port = await server.bind(host, port)
    server.addresses = public_addresses(host, port, advertised)
    # Before the first call can come, so that a node on this machine finds the key that it looks for.
    events += local_operator(state.ledger, (_here(host, port), *server.addresses)[:MOST_ADDRESSES], server.pin)
    text = ""
    stale = paths.invitation is not None and not (old is not None and _leads_here(paths.invitation, old, server))
    if (first := first_invitation(state.ledger, time.time(), another=stale)) is not None:
        events.append(first[0])
        text = server.invitation(first[0].invitation, first[1])
        if paths.invitation is not None:
            write_private(paths.invitation, f"{text}\n".encode())
            if old is not None and old.id in state.ledger.access.invitations:
                events.append(Revoked("", (old.id,), time.time(), "the coordinator"))
    server.begin_with(events[begun:])
    await server.start()
    _tell(state.run, host, port, text, paths.invitation, json_lines=json_lines)
    announced = announcing(state.run.name, server.pin, host, port) if announce else nullcontext()
    async with answering(paths.health, "coordinator", lambda: _health(server)), announced:
        return await serve_until_over(server, events)


def _written_before(file: Path) -> Invitation | None:
    """The invitation that an earlier start wrote there, if it can be read. Raises ValueError if something else is there."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MOST_CHARACTERS + 1).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"--invitation-file {file} cannot be read ({error.strerror}); name another file") from None
    if text and not text.startswith(PREFIX):
        raise ValueError(f"--invitation-file {file} holds something else, which would be lost; name another file")
    try:
        return read_invitation(text)
    except ValueError:
        return None


def _leads_here(file: Path, shown: Invitation, server: Server) -> bool:
    """Whether it lets somebody in still, and nobody but its owner may read the file."""
    try:
        read_private(file)
    except (FileNotFoundError, ValueError):
        return False
    made = server.ledger.access.invitations.get(shown.id)
    leads_here = (shown.pin, shown.addresses) == (server.pin, server.addresses)
    return leads_here and made is not None and made.is_usable(time.time())


def _health(server: Server) -> tuple[bool, str]:
    ledger = server.ledger
    if server.is_deaf:
        return False, "nobody can connect any more"
    return True, f"run {ledger.run.get('name')!r}, step {ledger.training.step}, {len(ledger.members)} members"


def _tell(run: RunFile, host: str, port: int, invitation: str, file: Path | None, *, json_lines: bool) -> None:
    if file is not None:
        invitation = ""
    places = local_places(run.data.source, run.message("").data.tokenizer, run.model.pretrained, run.checkpoint.uri)
    allow = "".join(f" --allow-data {shlex.quote(path)}" for _, path in places)
    if json_lines:
        print(json.dumps({"event": "listening", "address": _here(host, port), "invitation": invitation}), flush=True)
        return
    print(f"Run {run.name!r}, listening on {f'[{host}]' if ':' in host else host}:{port}.")
    if file is not None:
        print(f"To take part, on each machine: dtfm-node join{allow}, with the invitation in {file}.")
    elif invitation:
        print(f"To take part, on each machine (up to {FIRST_USES}, within {FIRST_SECONDS / 86400:.0f} days):")
        print(f"    dtfm-node join {invitation}{allow}")
        if allow:
            print("  (the run names these files of each machine, and only its operator can allow that)")
    else:
        print("Nodes that were here come back by themselves. To let others in: dtfm-coordinator invite")
    if host in LOOPBACK:
        print("  (on this machine, dtfm-node join will do; others need: serve --listen 0.0.0.0:7400)")
    sys.stdout.flush()


def _here(host: str, port: int) -> str:
    """How this machine itself reaches a server that listens on ``host``."""
    if host in EVERYWHERE:
        return f"127.0.0.1:{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

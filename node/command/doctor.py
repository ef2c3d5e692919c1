"""`dtfm-node doctor`: what would stop this machine from joining a run."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dtfm.node.command.options import log_to_stderr, mistakes
from dtfm.node.data.allowed import read_allowed, said
from dtfm.node.host.identity import take_name
from dtfm.node.network.place_on_the_net import NoWayThere, place_on_the_net, resolved, usual_listen
from dtfm.protos.connection import read_address
from dtfm.protos.identity.access import Role, kept
from dtfm.protos.identity.enrolment import Entry
from dtfm.protos.identity.private_files import cache_folder


def doctor(
    coordinator: Annotated[
        str,
        typer.Argument(
            metavar="INVITATION|ADDRESS",
            envvar="DTFM_INVITATION",
            help="The coordinator. Default: the one that join would use, if there is one. No invitation is used up.",
            show_envvar=True,
        ),
    ] = "",
    listen: Annotated[str, typer.Option(help="HOST:PORT that a node here would listen on.")] = "",
    advertise: Annotated[list[str] | None, typer.Option(help="HOST[:PORT] where peers would reach it.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    snapshots: Annotated[Path | None, typer.Option(help="The folder for parts of the run's state.")] = None,
    allow_data: Annotated[list[str] | None, typer.Option(help="As for join, which remembers it.")] = None,
    allow_module: Annotated[list[str] | None, typer.Option(help="As for join, which remembers it.")] = None,
    id: Annotated[str, typer.Option(help="The name under which the node would join.")] = "",
    data: Annotated[
        bool, typer.Option(help="Read the run's data and model, as join does. That may take as long as there.")
    ] = True,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object per line, for scripts.")] = False,
) -> None:
    """Tries to join a run, and leaves again: says what would stop this machine, or slow it down, and how to fix it.

    It asks the coordinator whether this machine would be let in, reads the run's data and model as `join` does, and compares
    them with the others'. Nobody is enrolled. `join` need not read the same text again.

    Exit codes: 0 nothing needs fixing, 1 something does, 2 bad input.
    """
    from dtfm.node.doctor.doctor import Place, examine
    from dtfm.node.doctor.wish import Wish

    with mistakes():
        is_known = bool(coordinator) or any(access.enrolled for access in kept([Role.NODE, Role.OPERATOR]))
        entry = Entry(coordinator, [Role.NODE], id or _name()) if is_known else None
        try:
            facing, behind_nat = place_on_the_net(entry) if entry is not None else ("", False)
        except NoWayThere:
            facing, behind_nat = "", False  # one of the findings
        listen = listen or (usual_listen(facing) if facing else "0.0.0.0:0")
        read_address(listen)
        place = Place(
            listen=listen,
            device=device,
            snapshots=(snapshots or cache_folder() / "snapshots").absolute(),
            advertise=tuple(map(resolved, advertise or ())),
            facing=facing,
            behind_nat=behind_nat,
        )
        log_to_stderr(False, False)
        places, modules = said(allow_data), said(allow_module)
        wish = Wish(
            device,
            None if places is None else read_allowed(places),
            None if modules is None else tuple(modules),
            reads=data,
        )
        found = asyncio.run(examine(entry, place, wish))
    for finding in found:
        if json_lines:
            print(json.dumps(asdict(finding)))
        else:
            print(f"{ {True: 'good', False: 'BAD ', None: 'hm  '}[finding.good] } {finding.check}: {finding.finding}")
    for title, good in (("To fix:", False), ("What could be better:", None)):
        fixes = [f"{finding.check}: {finding.fix}" for finding in found if finding.good is good and finding.fix]
        if fixes and not json_lines:
            print(f"\n{title}", *(f"  {number}. {fix}" for number, fix in enumerate(fixes, start=1)), sep="\n")
    raise typer.Exit(1 if any(finding.good is False for finding in found) else 0)


def _name() -> str:
    """The name for the node to join under. If none can be kept, one of the findings says so."""
    try:
        return take_name()
    except ValueError:
        return "doctor"

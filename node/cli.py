"""The ``dtfm-node`` command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from dtfm.node.host.device import measure_device, open_device
from dtfm.node.host.doctor import examine
from dtfm.node.host.trace import write_trace
from dtfm.node.session import Session, Settings
from dtfm.protos.access import Role
from dtfm.protos.connection import read_address
from dtfm.protos.enrolment import Entry

app = typer.Typer(
    help="Lends this machine's GPU (or CPU) to a training run.", no_args_is_help=True, add_completion=False
)


@app.command()
def join(
    invitation: Annotated[
        str,
        typer.Argument(
            metavar="INVITATION",
            envvar="DTFM_INVITATION",
            help="What `dtfm-coordinator invite` printed, or a file with it. It is needed once. Later HOST:PORT will do, or "
            "nothing, for the coordinator that was used or started last on this machine.",
            show_envvar=True,
        ),
    ] = "",
    id: Annotated[
        str,
        typer.Option(help="This node's name, kept across restarts. Default: the host name and a number, remembered."),
    ] = "",
    run: Annotated[str, typer.Option(help="Join only if the coordinator's run has this name.")] = "",
    listen: Annotated[
        str,
        typer.Option(
            help="HOST:PORT to listen on for peers. Port 0 takes a free one; behind NAT give a forwarded one."
        ),
    ] = "",
    advertise: Annotated[
        str,
        typer.Option(
            help="HOST[:PORT] at which peers reach this node. Default: the address that faces the coordinator."
        ),
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    memory: Annotated[
        str,
        typer.Option(help="The most memory that work on this node may take, e.g. 6GiB. Default: what is free."),
    ] = "",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads to compute with. 0: PyTorch's default.")] = 0,
    give_up_after: Annotated[
        float, typer.Option(min=0, help="Exit with 1 after this many seconds without a coordinator.")
    ] = 300.0,
    allow_module: Annotated[
        list[str] | None,
        typer.Option(help="Let the run name code in this installed package.module (may be given several times)."),
    ] = None,
    notices: Annotated[
        bool,
        typer.Option(
            help="Leave in order when the cloud host (AWS, Google, Azure) gives notice that it will take this machine away."
        ),
    ] = True,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write what this node does, and when, to this file, to be opened at ui.perfetto.dev."),
    ] = None,
    snapshots: Annotated[
        Path | None,
        typer.Option(
            help="The folder for parts of the run's state, kept on this disk until the run is over, so that it survives the "
            "loss of other nodes. Default: ~/.cache/dtfm/snapshots."
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every message.")] = False,
) -> None:
    """Joins a run and takes part until it is over.

    SIGTERM or Ctrl-C hands this node's part over to the others, which costs them no step, and exits 0; a second one exits at
    once. Exit codes: 0 the run is complete or this node left in order, 1 the run failed or the coordinator is gone, 2 bad input
    or a refusal.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("dtfm").setLevel(logging.DEBUG if verbose else logging.INFO)
    if threads:
        torch.set_num_threads(threads)
    try:
        node = id or _remembered_identity()
        entry = Entry(invitation, [Role.NODE], node)
        advertised = advertise or _address_facing([read_address(address)[0] for address in entry.leads_to[0]])
        if ":" in advertised.rpartition("]")[2]:
            read_address(advertised)
        listen = listen or ("127.0.0.1:0" if advertised.startswith("127.") else "0.0.0.0:0")
        read_address(listen)
        settings = Settings(
            coordinator=entry,
            node=node,
            run=run,
            listen=listen,
            advertise=advertised,
            device=open_device(device),
            give_up_after=give_up_after,
            allowed_modules=tuple(allow_module or ()),
            leave_on_preemption=notices,
            snapshots=(snapshots or _cache() / "snapshots").absolute(),
        )
        with write_trace(trace, settings.node) if trace else nullcontext():
            raise typer.Exit(asyncio.run(_join(settings, _read_size(memory))))
    except ValueError as mistake:
        print(mistake, file=sys.stderr)
        raise typer.Exit(2) from None


@app.command()
def doctor(
    coordinator: Annotated[
        str, typer.Argument(help="An invitation, or the coordinator's HOST:PORT; it is not asked if left out.")
    ] = "",
    listen: Annotated[str, typer.Option(help="HOST:PORT that a node here would listen on.")] = "0.0.0.0:0",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Says what would stop this machine from joining a run, and how to fix it. Exit codes: 0 nothing, 1 something."""
    findings = asyncio.run(examine(coordinator, listen, device))
    for finding in findings:
        if json_lines:
            print(json.dumps(asdict(finding)))
        else:
            mark = {True: "good", False: "BAD ", None: "hm  "}[finding.good]
            print(f"{mark} {finding.check}: {finding.finding}" + (f"\n     fix: {finding.fix}" if finding.fix else ""))
    raise typer.Exit(1 if any(finding.good is False for finding in findings) else 0)


async def _join(settings: Settings, most_memory: int | None) -> int:
    device = await asyncio.to_thread(measure_device, settings.device)
    device.memory_bytes = min(device.memory_bytes, most_memory or device.memory_bytes)
    memory, speed = device.memory_bytes / 2**30, device.flops / 1e9
    power = f"{memory:.1f} GiB free, {speed:.0f} GFLOP/s in matrix products"
    print(f"{settings.node}: {device.name} ({device.kind}), {power}", flush=True)
    session = Session(settings, device)
    signalled = False

    def on_signal(name: str) -> None:
        nonlocal signalled
        if signalled:
            os._exit(130)
        signalled = True
        print(
            f"{name}: handing over to the others, then leaving. A second {name} exits at once.",
            file=sys.stderr,
            flush=True,
        )
        session.leave(name)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, signal.Signals(number).name)
    return await session.run()


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtfm"


def _address_facing(hosts: Sequence[str]) -> str:
    """The local address from which one of ``hosts``, the first that there is a way to, is reached. Sends nothing. Raises
    ValueError."""
    for host in hosts[:-1]:
        with contextlib.suppress(ValueError):
            return _facing(host)
    return _facing(hosts[-1])


def _facing(host: str) -> str:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            local = probe.getsockname()[0]
    except OSError as error:
        raise ValueError(
            f"{host!r} cannot be resolved or reached ({error}); is the coordinator's address right?"
        ) from None
    return f"[{local}]" if ":" in local else local


def _read_size(text: str) -> int | None:
    """The size in bytes; None for an empty text."""
    if not text:
        return None
    try:
        return TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(text)
    except ValidationError:
        raise ValueError(f"--memory {text!r} is not an amount of memory; give it like 6GiB or 500MB") from None


def _remembered_identity() -> str:
    """A name drawn once per machine and user, so that a node that comes back is recognised."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "dtfm" / "identity"
    try:
        if not state.exists():
            state.parent.mkdir(parents=True, exist_ok=True)
            state.write_text(f"{socket.gethostname().split('.')[0]}-{secrets.token_hex(2)}\n")
        return state.read_text().strip()
    except OSError as error:
        raise ValueError(f"this node's name cannot be stored in {state} ({error}); give one with --id NAME") from None


def main() -> None:
    app()


if __name__ == "__main__":
    main()

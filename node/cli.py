"""The ``dtfm-node`` command."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from dtfm.node.data.allowed import read_allowed
from dtfm.node.host.addresses import identity_ports
from dtfm.node.host.identity import take_name
from dtfm.node.host.long_parts import long_part
from dtfm.node.host.named_devices import devices_named, slots
from dtfm.node.host.packages import require_extra
from dtfm.node.host.trace import write_trace
from dtfm.node.host.way_in import way_in
from dtfm.node.supervisor import supervise
from dtfm.protos.access import Role
from dtfm.protos.candidates import way_to
from dtfm.protos.connection import DEFAULT_LEASE, read_address
from dtfm.protos.control_pb2 import Device, Hello
from dtfm.protos.enrolment import Entry

if TYPE_CHECKING:  # PyTorch takes seconds to load; see _join
    import torch

    from dtfm.node.session import Settings

app = typer.Typer(
    help="Lends this machine's GPU (or CPU) to a training run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # they show the values of variables, secrets among them
)

SAME_SIGNAL_SECONDS = 0.5
"""A signal comes twice if the supervisor of several nodes gets it, and the nodes too, as from systemd."""

InvitationArgument = Annotated[
    str,
    typer.Argument(
        metavar="INVITATION",
        envvar="DTFM_INVITATION",
        help="What `dtfm-coordinator invite` printed, or a file with it. It is needed once. Later HOST:PORT will do, or "
        "nothing, for the coordinator that was used or started last on this machine. Without any, runs on the local network are "
        "listed.",
        show_envvar=True,
    ),
]
ENVIRONMENT = {"auto_envvar_prefix": "DTFM"}
"""Every option of these commands can come from the environment: DTFM_LISTEN for --listen, as containers need it."""
Health = Annotated[
    Path | None,
    typer.Option(
        help="The folder for a socket on which this process answers how it is: `python -m dtfm.protos.health` asks."
    ),
]


@app.command(context_settings=ENVIRONMENT)
def join(
    invitation: InvitationArgument = "",
    id: Annotated[
        str,
        typer.Option(
            help="This node's name, kept across restarts. Default: the host name and a number, remembered; a second node on "
            "this machine gets one of its own."
        ),
    ] = "",
    run: Annotated[str, typer.Option(help="Join only if the coordinator's run has this name.")] = "",
    listen: Annotated[
        str,
        typer.Option(
            help="HOST:PORT to listen on for peers. Port 0 takes a free one; behind NAT give a forwarded one."
        ),
    ] = "",
    advertise: Annotated[
        list[str] | None,
        typer.Option(
            help="HOST[:PORT] at which peers reach this node, beside the addresses that it finds by itself (may be given several "
            "times)."
        ),
    ] = None,
    relay: Annotated[
        bool,
        typer.Option(
            "--relay", help="Let connections between nodes that cannot reach each other pass through this one."
        ),
    ] = False,
    open_port: Annotated[
        bool,
        typer.Option(help="Ask the home router (UPnP) to open this node's port while it takes part."),
    ] = True,
    device: Annotated[
        str,
        typer.Option(
            help="auto, cpu, cuda or cuda:N; or all, for a node on each GPU; or several, like cuda:0,cuda:2. Each of several has "
            "its own name, and ports of --listen and --advertise count up."
        ),
    ] = "auto",
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
    allow_data: Annotated[
        list[str] | None,
        typer.Option(
            help="Let the run name this local file or folder, or what matches, like '/data/*.txt', for its data, tokenizer, "
            "pretrained weights or checkpoints (may be given several times). Not needed for names on the hub and URLs like "
            "s3://, nor by the user who runs the coordinator."
        ),
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
    health: Health = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every message.")] = False,
) -> None:
    """Joins a run and takes part until it is over.

    SIGTERM or Ctrl-C hands this node's part over to the others, which costs them no step, and exits 0; a second one exits at
    once. Exit codes: 0 the run is complete or this node left in order, 1 the run failed or the coordinator is gone, 2 bad input
    or a refusal.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("dtfm").setLevel(logging.DEBUG if verbose else logging.INFO)

    def member(number: int) -> int:
        slot = slots(devices)[number] if several else ""
        node = f"{id}-{slot}" if id and slot else id or take_name(slot)
        entry = Entry(invitation, [Role.NODE], node)
        settings = _settings(
            entry,
            node,
            listen,
            advertise,
            number=number,
            run=run,
            relay=Hello.ALSO if relay else Hello.NO,
            open_port=open_port,
            give_up_after=give_up_after,
            allow_module=allow_module,
            allow_data=allow_data,
            notices=notices,
            snapshots=snapshots,
            health=health,
        )
        traced = trace.with_stem(f"{trace.stem}-{slot}") if trace and slot else trace
        with write_trace(traced, node) if traced else nullcontext():
            joined = _join(entry, settings, devices[number], threads, most_memory, supervised=len(devices) > 1)
            return asyncio.run(joined)

    try:
        require_extra()
        devices, most_memory = devices_named(device), _read_size(memory)
        several = device == "all" or len(devices) > 1
        invitation = invitation or asyncio.run(way_in("dtfm-node join"))
        Entry(invitation, [Role.NODE], id)  # a mistake in it is told once
        raise typer.Exit(supervise(slots(devices), member) if len(devices) > 1 else member(0))
    except ValueError as mistake:
        print(mistake, file=sys.stderr)
        raise typer.Exit(2) from None


@app.command(context_settings=ENVIRONMENT)
def relay(
    invitation: InvitationArgument = "",
    id: Annotated[str, typer.Option(help="This relay's name, kept across restarts.")] = "",
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on; others must reach it.")] = "",
    advertise: Annotated[list[str] | None, typer.Option(help="HOST[:PORT] at which others reach it.")] = None,
    give_up_after: Annotated[
        float, typer.Option(min=0, help="Exit with 1 after this many seconds without a coordinator.")
    ] = 300.0,
    health: Health = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every message.")] = False,
) -> None:
    """Passes on what nodes that cannot reach each other have to say, and sees ciphertext alone. It computes nothing."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("dtfm").setLevel(logging.DEBUG if verbose else logging.INFO)
    try:
        require_extra()
        import torch

        node = id or take_name()
        entry = Entry(invitation or asyncio.run(way_in("dtfm-node relay")), [Role.NODE], node)
        settings = _settings(
            entry, node, listen, advertise, relay=Hello.ONLY, give_up_after=give_up_after, health=health
        )(torch.device("cpu"))
        raise typer.Exit(asyncio.run(_take_part(settings, Device(kind="cpu", name="relay", memory_bytes=1, flops=1.0))))
    except ValueError as mistake:
        print(mistake, file=sys.stderr)
        raise typer.Exit(2) from None


@app.command()
def doctor(
    coordinator: Annotated[
        str,
        typer.Argument(
            metavar="[INVITATION|HOST:PORT]",
            envvar="DTFM_INVITATION",
            help="The coordinator; it is not asked if left out. No invitation is used up.",
            show_envvar=True,
        ),
    ] = "",
    listen: Annotated[str, typer.Option(help="HOST:PORT that a node here would listen on.")] = "",
    advertise: Annotated[list[str] | None, typer.Option(help="HOST[:PORT] at which peers would reach it.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    snapshots: Annotated[Path | None, typer.Option(help="The folder for parts of the run's state.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Says what would stop this machine from joining a run, or slow it down, and how to fix it.

    Exit codes: 0 nothing needs fixing, 1 something does, 2 bad input.
    """
    from dtfm.node.host.doctor import Place, examine

    try:
        entry = Entry(coordinator, [Role.NODE], "doctor") if coordinator else None
        try:
            facing, behind_nat = _place_on_the_net(entry) if entry is not None else ("", False)
        except NoWayThere:
            facing, behind_nat = "", False  # one of the findings
        listen = listen or (_usual_listen(facing) if facing else "0.0.0.0:0")
        read_address(listen)
        place = Place(
            listen=listen,
            device=device,
            snapshots=(snapshots or _cache() / "snapshots").absolute(),
            advertise=tuple(map(_resolved, advertise or ())),
            facing=facing,
            behind_nat=behind_nat,
        )
        found = asyncio.run(examine(entry, place))
    except ValueError as mistake:
        print(mistake, file=sys.stderr)
        raise typer.Exit(2) from None
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


@app.command()
def bench(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    snapshots: Annotated[Path | None, typer.Option(help="The folder whose disk is measured.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Measures what this machine can do for a run: the device, the codecs, streams on loopback, the disk."""
    try:
        require_extra()
        from dtfm.node.bench import bench as measures
        from dtfm.node.host.device import open_device
        from dtfm.node.host.rows import Row, show

        rows: list[Row] = []
        for what, measure in measures(open_device(device), (snapshots or _cache() / "snapshots").absolute()):
            print(f"measuring {what} ...", file=sys.stderr, flush=True)
            rows += measure()
    except ValueError as mistake:
        print(mistake, file=sys.stderr)
        raise typer.Exit(2) from None
    show(f"This machine, {socket.gethostname()}", rows, json_lines)


@app.command()
def workload(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    output: Annotated[Path | None, typer.Option(help="Write it to this file. Default: print it.")] = None,
    allow_module: Annotated[
        list[str] | None,
        typer.Option(help="Let the run name code in this installed package.module (may be given several times)."),
    ] = None,
) -> None:
    """Says what a run asks of the machines that train it: WORKLOAD.json for `dtfm-coordinator plan`.

    Nothing is trained and no data is read; a model of any size takes seconds and little memory.
    """
    try:
        require_extra()
        from dtfm.node.workload_file import describe, read_run

        text = describe(read_run(run), tuple(allow_module or ()))
        if output is None:
            print(text)
            return
        try:
            output.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{output} cannot be written: {error.strerror}; give --output another file") from None
    except ValueError as mistake:
        print(mistake, file=sys.stderr)
        raise typer.Exit(2) from None


def _settings(
    coordinator: Entry,
    node: str,
    listen: str,
    advertise: list[str] | None,
    *,
    relay: Hello.Relay,
    give_up_after: float,
    health: Path | None,
    number: int = 0,
    run: str = "",
    open_port: bool = True,
    allow_module: list[str] | None = None,
    allow_data: list[str] | None = None,
    notices: bool = False,
    snapshots: Path | None = None,
) -> Callable[[torch.device], Settings]:
    """What the options say, for the device that is opened once PyTorch is loaded. ``number``: which it is of several nodes that
    are started together. Raises ValueError."""
    facing, behind_nat = _place_on_the_net(coordinator)
    listens = _nth_port(listen, number) if listen else _usual_listen(facing, number)
    read_address(listens)
    allowed = read_allowed(allow_data or ())
    advertised = tuple(_nth_port(_resolved(each), number) for each in advertise or ())

    def settings(opened: torch.device) -> Settings:
        from dtfm.node.session import Settings

        return Settings(
            coordinator=coordinator,
            node=node,
            run=run,
            listen=listens,
            advertise=advertised,
            facing=facing,
            relay=relay,
            open_port=open_port and behind_nat,
            device=opened,
            give_up_after=give_up_after,
            allowed_modules=tuple(allow_module or ()),
            allowed_data=allowed,
            leave_on_preemption=notices,
            snapshots=(snapshots or _cache() / "snapshots").absolute(),
            tokens=_cache() / "tokens",
            health=health,
        )

    return settings


async def _join(
    coordinator: Entry,
    settings: Callable[[torch.device], Settings],
    device: str,
    threads: int,
    most_memory: int | None,
    *,
    supervised: bool,
) -> int:
    coordinator.begin(DEFAULT_LEASE)
    with long_part("loading PyTorch"):  # meanwhile this node enrols
        torch = await asyncio.to_thread(import_module, "torch")
        await asyncio.to_thread(import_module, "dtfm.node.session")
    if threads:
        torch.set_num_threads(threads)
    from dtfm.node.host.device import measure_device, open_device

    chosen = settings(open_device(device))
    with long_part("measuring the device"):
        measured = await asyncio.to_thread(measure_device, chosen.device)
    measured.memory_bytes = min(measured.memory_bytes, most_memory or measured.memory_bytes)
    memory, speed = measured.memory_bytes / 2**30, measured.flops / 1e9
    power = f"{memory:.1f} GiB free, {speed:.0f} GFLOP/s in matrix products"
    print(f"{chosen.node}: {measured.name} ({measured.kind}), {power}", flush=True)
    return await _take_part(chosen, measured, supervised=supervised)


async def _take_part(settings: Settings, device: Device, *, supervised: bool = False) -> int:
    from dtfm.node.session import Session

    session = Session(settings, device)
    signalled: float | None = None

    def on_signal(name: str) -> None:
        nonlocal signalled
        if signalled is not None:
            if supervised and time.monotonic() - signalled < SAME_SIGNAL_SECONDS:
                return
            os._exit(130)
        signalled = time.monotonic()
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


class NoWayThere(ValueError):
    """The coordinator's name cannot be resolved, or nothing leads to its address."""


def _place_on_the_net(coordinator: Entry) -> tuple[str, bool]:
    """This machine's address that faces the coordinator, and whether this one is behind NAT. The coordinator's first address
    counts that there is a way to, one on loopback only if it has no other: then others are elsewhere. Sends nothing. Raises
    NoWayThere."""
    facing, problem = [], NoWayThere("the coordinator has no address")
    for address in coordinator.leads_to[0]:
        try:
            facing.append(_facing(read_address(address)[0]))
        except NoWayThere as error:
            problem = error
    if not facing:
        raise problem
    # The sort is stable.
    facing.sort(key=lambda each: ip_address(each[0]).is_loopback)
    return facing[0][0], any(_is_behind_nat(here, there) for here, there in facing)


def _is_behind_nat(facing: str, there: str) -> bool:
    """Whether this machine's address is private, and the coordinator's is not."""
    return way_to(ip_address(facing)) == "lan" and way_to(ip_address(there)) == "public"


def _facing(host: str) -> tuple[str, str]:
    """The local address from which ``host`` is reached, and the host's own. Raises NoWayThere."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            local = probe.getsockname()[0]
    except OSError as error:
        raise NoWayThere(
            f"{host!r} cannot be resolved or reached ({error}); is the coordinator's address right?"
        ) from None
    return str(local).partition("%")[0], str(address[0]).partition("%")[0]


def _usual_listen(facing: str, number: int = 0) -> str:
    """Loopback for a coordinator on this machine; otherwise everywhere, on a port that a rented machine's host maps to itself, if
    it does that, the one for the node with this ``number`` first, or any free one."""
    if ip_address(facing).is_loopback:
        return f"[{facing}]:0" if ":" in facing else f"{facing}:0"
    ports = identity_ports(os.environ)
    return f"0.0.0.0:{next(filter(_is_free, (*ports[number:], *ports[:number])), 0)}"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def _nth_port(address: str, number: int) -> str:
    """HOST:PORT of the node with this ``number`` among several, where ``address`` is the first one's: ports count up, but for 0,
    any free one. A HOST alone stays as it is."""
    host, colon, port = address.rpartition(":")
    if not number or not colon or not port.isdecimal() or port == "0" or (":" in host and not host.endswith("]")):
        return address
    return f"{host}:{int(port) + number}"


def _resolved(advertise: str) -> str:
    """HOST[:PORT] with the host's IP address. A name would mean something else elsewhere, so it is looked up here."""
    bare = advertise if advertise.startswith("[") or advertise.count(":") < 2 else f"[{advertise}]"
    has_port = ":" in bare.rpartition("]")[2]
    host, port = read_address(bare if has_port else f"{bare}:1")
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ValueError(
            f"--advertise {advertise}: {host!r} is not known here ({error}); give the IP address"
        ) from None
    shown = f"[{address}]" if ":" in str(address) else str(address)
    return f"{shown}:{port}" if has_port else shown


def _read_size(text: str) -> int | None:
    """The size in bytes; None for an empty text."""
    if not text:
        return None
    try:
        return TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(text)
    except ValidationError:
        raise ValueError(f"--memory {text!r} is not an amount of memory; give it like 6GiB or 500MB") from None


def main() -> None:
    app()


if __name__ == "__main__":
    main()

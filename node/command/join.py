"""`dtfm-node join`: this machine takes part in a run."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import nullcontext
from enum import StrEnum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from dtfm.node.command.options import InvitationArgument, Json, Verbose, log_to_stderr, look, mistakes
from dtfm.node.command.taking_part import invitation_needed, place_of, take_part
from dtfm.node.data.allowed import read_allowed, said
from dtfm.node.data.problems import told_together
from dtfm.node.host.identity import take_name
from dtfm.node.host.long_parts import long_part
from dtfm.node.host.named_devices import devices_named, gpus_here, see_only, slots
from dtfm.node.host.packages import require_extra
from dtfm.node.host.trace import write_trace
from dtfm.node.network.place_on_the_net import resolved
from dtfm.node.settings import Settings
from dtfm.node.supervisor import supervise
from dtfm.programs import START_AGAIN
from dtfm.protos.connection import read_address
from dtfm.protos.control_pb2 import Hello
from dtfm.protos.identity.access import Role
from dtfm.protos.identity.enrolment import Entry
from dtfm.protos.identity.private_files import cache_folder

log = logging.getLogger(__name__)

_network = partial(typer.Option, rich_help_panel="How others reach this node")
_machine = partial(typer.Option, rich_help_panel="What of this machine is used")
_allowed = partial(typer.Option, rich_help_panel="What of this machine the run may name")
_end = partial(typer.Option, rich_help_panel="When it ends")


class Preemption(StrEnum):
    AUTO = "auto"
    OFF = "off"


def join(
    invitation: InvitationArgument = "",
    id: Annotated[
        str,
        typer.Option(
            help="This node's name, kept across restarts. Default: the host name and a number, remembered; a second node on "
            "this machine gets one of its own."
        ),
    ] = "",
    listen: Annotated[
        str,
        _network(help="HOST:PORT to listen on for peers. Port 0 takes a free one; behind NAT give a forwarded one."),
    ] = "",
    advertise: Annotated[
        list[str] | None,
        _network(
            help="HOST[:PORT] where peers reach this node, beside the addresses that it finds by itself (may be given several "
            "times)."
        ),
    ] = None,
    relay: Annotated[
        bool,
        _network("--relay", help="Let connections between nodes that cannot reach each other pass through this one."),
    ] = False,
    open_port: Annotated[
        bool,
        _network(help="Ask the home router (UPnP) to open this node's port while it takes part."),
    ] = True,
    device: Annotated[
        str,
        _machine(
            help="auto, cpu, cuda or cuda:N; or all, for a node on each GPU; or several, like cuda:0,cuda:2. Each of several has "
            "its own name, and ports of --listen and --advertise count up."
        ),
    ] = "auto",
    memory: Annotated[
        str,
        _machine(help="The most memory that work on this node may take, e.g. 6GiB. Default: all free memory."),
    ] = "",
    threads: Annotated[int, _machine(min=0, help="CPU threads to compute with. 0: PyTorch's default.")] = 0,
    give_up_after: Annotated[
        float,
        _end(
            min=0,
            help="Exit with 1 after this many seconds without a coordinator. Once it was let in, the run says how long "
            "(an hour, by default).",
        ),
    ] = 300.0,
    preemption: Annotated[
        Preemption,
        _end(
            help="auto: on AWS, Google Cloud or Azure, as the firmware says, watch for a preemption notice, and leave in order "
            "then. off: ask no cloud."
        ),
    ] = Preemption.AUTO,
    allow_module: Annotated[
        list[str] | None,
        _allowed(
            help="Let the run name code in this installed package.module (may be given several times; remembered "
            "for this coordinator; none takes it back)."
        ),
    ] = None,
    allow_data: Annotated[
        list[str] | None,
        _allowed(
            help="Let the run use this place for its data, tokenizer, pretrained weights or checkpoints (may be given several "
            "times). A place is a local file or folder, or a pattern like '/data/*.txt'. It may need this machine's keys, like "
            "'s3://bucket/run', or its token of the hub, like 'hf:OWNER/NAME'. Or it is a URL in this machine's network. "
            "Remembered for this coordinator until it is given again; none takes it back. Not needed for public repositories "
            "of the hub, nor by the user who runs the coordinator."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        look(help="Write what this node does, and when, to this file, to be opened at ui.perfetto.dev."),
    ] = None,
    snapshots: Annotated[
        Path | None,
        _machine(
            help="The folder for parts of the run's state, kept on this disk until the run is over, so that it survives the "
            "loss of other nodes. Default: ~/.cache/dtfm/snapshots."
        ),
    ] = None,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Joins a run and takes part until it is over.

    SIGTERM or Ctrl-C hands this node's part over to the others, which costs them no step, and exits 0; a second one exits at
    once. Exit codes: 0 the run is complete or this node left in order, 1 the run failed, the device
    failed, or there is no room or no coordinator, 2 bad input
    or a refusal.
    """
    log_to_stderr(verbose, json)

    def member(number: int) -> int:
        slot = slots(devices)[number] if several else ""
        node = f"{id}-{slot}" if id and slot else id or take_name(slot)
        entry = Entry(invitation, [Role.NODE], node)
        listens, advertised, facing, behind_nat = place_of(entry, listen, advertise, number)
        settings = Settings(
            coordinator=entry,
            node=node,
            listen=listens,
            advertise=advertised,
            facing=facing,
            relay=Hello.ALSO if relay else Hello.NO,
            give_up_after=give_up_after,
            open_port=open_port and behind_nat,
            allowed_modules=None if (modules := said(allow_module)) is None else tuple(modules),
            allowed_data=None if (places := said(allow_data)) is None else read_allowed(places),
            leave_on_preemption=preemption is Preemption.AUTO,
            snapshots=(snapshots or cache_folder() / "snapshots").absolute(),
        )
        traced = trace.with_stem(f"{trace.stem}-{slot}") if trace and slot else trace
        with write_trace(traced, node) if traced else nullcontext():
            gpus = max(gpus_here() or 0, sum(each.startswith("cuda") for each in devices))
            joined = _join(settings, devices[number], threads, most_memory, gpus, len(devices) > 1)
            return asyncio.run(joined)

    with mistakes():
        require_extra()
        told_together(
            (
                partial(devices_named, device),
                partial(_read_size, memory),
                partial(read_allowed, said(allow_data) or ()),
                lambda: listen and read_address(listen),
                *(partial(resolved, each) for each in advertise or ()),
                lambda: invitation and Entry(invitation, [Role.NODE], id),
            )
        )
        devices, most_memory = devices_named(device), _read_size(memory)
        several = device == "all" or len(devices) > 1
        invitation = invitation or invitation_needed("dtfm-node join")
        raise typer.Exit(supervise(slots(devices), member) if len(devices) > 1 else member(0))


async def _join(
    settings: Settings, device: str, threads: int, most_memory: int | None, gpus: int, supervised: bool
) -> int:
    alone = see_only(device)  # before CUDA is used
    with long_part("loading PyTorch"):
        torch = await asyncio.to_thread(import_module, "torch")
        await asyncio.to_thread(import_module, "dtfm.node.session")
    if threads:
        torch.set_num_threads(threads)
    from dtfm.node.host.device import measure_device, open_device

    opened = open_device(alone, device)
    with long_part("measuring the device"):
        measured = await asyncio.to_thread(measure_device, opened, gpus or None)
    measured.memory_bytes = min(measured.memory_bytes, most_memory or measured.memory_bytes)
    memory, speed = measured.memory_bytes / 2**30, measured.flops / 1e9
    power = f"{memory:.1f} GiB free, {speed:.0f} GFLOP/s in matrix products"
    log.info("%s: %s (%s), %s", settings.node, measured.name, measured.kind, power)
    code = await take_part(settings, opened, measured, supervised=supervised)
    if code == START_AGAIN:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if supervised else 1)  # what else a process does at its end may wait for the device
    return code


def _read_size(text: str) -> int | None:
    """The size in bytes; None for an empty text."""
    if not text:
        return None
    try:
        return TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(text)
    except ValidationError:
        raise ValueError(f"--memory {text!r} is not an amount of memory; give it like 6GiB or 500MB") from None

"""`dtfm-node relay`: this machine passes on what others say."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from dtfm.node.command.options import InvitationArgument, Json, Verbose, log_to_stderr, mistakes
from dtfm.node.command.taking_part import invitation_needed, place_of, take_part
from dtfm.node.host.identity import take_name
from dtfm.node.host.packages import require_extra
from dtfm.node.settings import Settings
from dtfm.programs import ended_by_ctrl_c
from dtfm.protos.control_pb2 import Device, Hello
from dtfm.protos.identity.access import Role
from dtfm.protos.identity.enrolment import Entry


def relay(
    invitation: InvitationArgument = "",
    id: Annotated[str, typer.Option(help="This relay's name, kept across restarts.")] = "",
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on; others must reach it.")] = "",
    advertise: Annotated[list[str] | None, typer.Option(help="HOST[:PORT] where others reach it.")] = None,
    give_up_after: Annotated[
        float, typer.Option(min=0, help="Exit with 1 after this many seconds without a coordinator.")
    ] = 300.0,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Passes on messages between nodes that cannot reach each other, and sees ciphertext alone. It computes nothing."""
    log_to_stderr(verbose, json)
    with mistakes():
        require_extra()
        with ended_by_ctrl_c():
            import torch

        node = id or take_name()
        entry = Entry(invitation or invitation_needed("dtfm-node relay"), [Role.NODE], node)
        listens, advertised, facing, _ = place_of(entry, listen, advertise)
        settings = Settings(entry, node, listens, advertised, facing, Hello.ONLY, give_up_after)
        hardware = Device(kind="cpu", name="relay", memory_bytes=1, flops=1.0)
        raise typer.Exit(asyncio.run(take_part(settings, torch.device("cpu"), hardware)))

"""What `join` and `relay` have in common: from options to a session that ends in order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from dtfm.node.command.status_line import status_line
from dtfm.node.network.place_on_the_net import nth_port, place_on_the_net, resolved, usual_listen
from dtfm.node.settings import Settings
from dtfm.protos.connection import read_address
from dtfm.protos.control_pb2 import Device
from dtfm.protos.enrolment import Entry

if TYPE_CHECKING:  # PyTorch takes seconds to load
    import torch

SAME_SIGNAL_SECONDS = 0.5
"""A signal comes twice if the supervisor of several nodes gets it, and the nodes too, as from systemd."""


def place_of(
    coordinator: Entry, listen: str, advertise: list[str] | None, number: int = 0
) -> tuple[str, tuple[str, ...], str, bool]:
    """Where a node is to listen, where it is advertised, its address that faces the coordinator, and whether it is behind NAT.
    ``number``: which it is of several nodes that are started together. Raises ValueError."""
    facing, behind_nat = place_on_the_net(coordinator)
    listens = nth_port(listen, number) if listen else usual_listen(facing, number)
    read_address(listens)
    return listens, tuple(nth_port(resolved(each), number) for each in advertise or ()), facing, behind_nat


async def take_part(settings: Settings, device: torch.device, hardware: Device, *, supervised: bool = False) -> int:
    from dtfm.node.session import Session

    session = Session(settings, device, hardware)
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
    async with status_line(session.status_line):
        return await session.run()

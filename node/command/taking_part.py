"""What `join` and `relay` have in common: from options to a session that ends in order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dtfm.node.command.status_line import status_line
from dtfm.node.data.allowed import read_allowed
from dtfm.node.host.cache_folder import cache
from dtfm.node.network.place_on_the_net import nth_port, place_on_the_net, resolved, usual_listen
from dtfm.protos.connection import read_address
from dtfm.protos.control_pb2 import Device, Hello
from dtfm.protos.enrolment import Entry

if TYPE_CHECKING:  # PyTorch takes seconds to load
    import torch

    from dtfm.node.session import Settings

SAME_SIGNAL_SECONDS = 0.5
"""A signal comes twice if the supervisor of several nodes gets it, and the nodes too, as from systemd."""


def settings_for(
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
    facing, behind_nat = place_on_the_net(coordinator)
    listens = nth_port(listen, number) if listen else usual_listen(facing, number)
    read_address(listens)
    allowed = read_allowed(allow_data or ())
    advertised = tuple(nth_port(resolved(each), number) for each in advertise or ())

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
            snapshots=(snapshots or cache() / "snapshots").absolute(),
            tokens=cache() / "tokens",
            health=health,
        )

    return settings


async def take_part(settings: Settings, device: Device, *, supervised: bool = False) -> int:
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
    async with status_line(session.status_line):
        return await session.run()

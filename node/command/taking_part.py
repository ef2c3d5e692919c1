"""What `join` and `relay` have in common: from options to a session that ends in order."""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import signal
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from dtfm.node.command.runs_here import list_runs, tell_which
from dtfm.node.command.status_line import status_line
from dtfm.node.host.preemption import notices
from dtfm.node.host.pulse import pulse
from dtfm.node.network.discovery import follow
from dtfm.node.network.place_on_the_net import NoWayThere, nth_port, place_on_the_net, resolved, usual_listen
from dtfm.node.settings import Settings
from dtfm.programs import heeding
from dtfm.protos.connection import read_address
from dtfm.protos.control_pb2 import Device
from dtfm.protos.identity.access import Role, kept
from dtfm.protos.identity.enrolment import Entry
from dtfm.protos.identity.invitation import read_invitation

if TYPE_CHECKING:  # PyTorch takes seconds to load
    import torch

log = logging.getLogger(__name__)

SAME_SIGNAL_SECONDS = 0.5
"""Signals within this time count as one: the supervisor of several nodes may get a signal, and the nodes too, as from systemd."""
MOST_TRIES = 3
"""Attempts to type an invitation."""


def invitation_needed(command: str) -> str:
    """Returns the argument of an Entry if the user has named no coordinator: empty for the last coordinator, or an invitation
    that the user types now. Before that, it lists the runs on the local network. ``command`` is the command that the user
    typed. Raises ValueError if an invitation is needed and none is given."""
    if any(access.enrolled for access in kept([Role.NODE, Role.OPERATOR])):
        return ""
    runs = list_runs()
    for _ in range(MOST_TRIES if sys.stdin.isatty() else 0):
        try:
            invitation = read_invitation(getpass.getpass("The invitation (not shown): ", sys.stderr))
        except ValueError as mistake:
            print(mistake, file=sys.stderr, flush=True)
        except EOFError:
            break
        else:
            tell_which(invitation, runs)
            return str(invitation)
    here = "" if runs else "no run announces itself on this network, and "
    raise ValueError(
        f"{here}an invitation is needed; ask whoever runs the coordinator for one (dtfm-coordinator invite), then:\n"
        f"    {command} dtfm1...."
    )


def place_of(
    coordinator: Entry, listen: str, advertise: list[str] | None, number: int = 0
) -> tuple[str, tuple[str, ...], str, bool]:
    """Where a node is to listen, where it is advertised, its address that faces the coordinator, and whether it is behind NAT.
    ``number``: the node's number among several that are started together. Raises ValueError."""
    try:
        facing, behind_nat = place_on_the_net(coordinator)
    except NoWayThere:
        if not asyncio.run(follow(coordinator)):
            raise
        facing, behind_nat = place_on_the_net(coordinator)
    listens = nth_port(listen, number) if listen else usual_listen(facing, number)
    read_address(listens)
    return listens, tuple(nth_port(resolved(each), number) for each in advertise or ()), facing, behind_nat


async def take_part(settings: Settings, device: torch.device, hardware: Device, *, supervised: bool = False) -> int:
    from dtfm.node.session import Session

    session = Session(settings, device, hardware)
    signalled: float | None = None

    def on_signal(number: signal.Signals) -> None:
        nonlocal signalled
        name = number.name
        if signalled is not None:
            if supervised and time.monotonic() - signalled < SAME_SIGNAL_SECONDS:
                return
            os._exit(130)
        signalled = time.monotonic()
        log.warning("%s: handing over to the others, then leaving. A second %s exits at once.", name, name)
        session.leave(name)

    for handler in logging.root.handlers:
        handler.addFilter(session.places)

    def on_notice(notice: str) -> None:
        if signalled is None:
            log.warning("%s: handing over to the others, then leaving.", notice)
            session.leave(notice)

    watching = notices(on_notice) if settings.leave_on_preemption else nullcontext()
    with heeding(on_signal):
        async with (
            watching,
            status_line(session.status_line),
            pulse(settings.node, lambda: session.problem, session.status_line),
        ):
            return await session.run()

"""Where to go if the user names no coordinator: to the one that was used last, at its old address or a new one, or to one that is
heard of on the local network, for which an invitation is needed."""

from __future__ import annotations

import getpass
import sys

from dtfm.node.network.discovery import LOOK_SECONDS, look_around
from dtfm.protos.access import Access, Role, kept
from dtfm.protos.announcement import Announcement
from dtfm.protos.credentials import fetch_authority
from dtfm.protos.invitation import read_invitation
from dtfm.protos.proof import ClockError

ANSWER_SECONDS = 3.0
"""How long a coordinator that is remembered may take to answer before it is looked for."""
MOST_TRIES = 3
"""To type an invitation."""


async def way_in(command: str) -> str:
    """What an Entry takes: empty for the coordinator that was used last, HOST:PORT where that one is now, or an invitation that
    the user gives. ``command``: what the user typed, to be shown with the invitation. Raises ValueError if one is needed and
    nobody can be asked."""
    remembered = [access for access in kept([Role.NODE, Role.OPERATOR]) if access.enrolled]
    if remembered:
        if await _answers(remembered[0].addresses, remembered[0]):
            return ""
        _say(f"The coordinator that was used last does not answer at {' or '.join(remembered[0].addresses)}.")
    found = await _look()
    for access in remembered:
        here = [address for each in found if each.pin == access.pin for address in each.addresses]
        if here and (address := await _answers(here, access)):
            _say(f"Going on with the run at {address}, which knows this machine.")
            return address
    if remembered:
        return ""
    if not found:
        raise ValueError(
            f"no run announces itself on this network; ask whoever runs one for an invitation (dtfm-coordinator invite), then:\n"
            f"    {command} dtfm1...."
        )
    if not sys.stdin.isatty():
        raise ValueError(
            f"an invitation is needed; ask for one there (dtfm-coordinator invite), then:\n    {command} dtfm1...."
        )
    return _asked_for()


async def _look() -> list[Announcement]:
    _say(f"Looking for runs on this network ({LOOK_SECONDS:.0f} s) ...")
    found: list[Announcement] = []

    def heard(announcement: Announcement) -> None:
        if announcement in found:
            return
        found.append(announcement)
        where = " or ".join(announcement.addresses)
        _say(
            f"  run {announcement.run!r} at {where}, authority {announcement.pin.hex()[:12]}, dtfm {announcement.version}"
        )

    try:
        await look_around(heard)
    except OSError as problem:
        _say(f"  this network cannot be asked: {problem}")
    return found


async def _answers(addresses: list[str] | tuple[str, ...], access: Access) -> str:
    """The address at which the remembered authority answers; empty if it does not."""
    try:
        return (await fetch_authority(addresses, access.pin, ANSWER_SECONDS))[0]
    except ClockError:
        return addresses[0]  # it is there, and will say what is wrong
    except (ConnectionError, PermissionError):
        return ""


def _asked_for() -> str:
    for _ in range(MOST_TRIES):
        try:
            text = getpass.getpass(
                "The invitation to one of these, from its dtfm-coordinator invite (not shown): ", sys.stderr
            )
            return str(read_invitation(text))
        except ValueError as mistake:
            _say(str(mistake))
        except EOFError:
            break
    raise ValueError("without an invitation there is no way in")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

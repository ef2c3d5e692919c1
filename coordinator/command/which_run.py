"""The run that a command means if it names none: the run of the current folder, as with git, or the only run that is up."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from dtfm.protos.identity.access import Access, Role, kept
from dtfm.protos.identity.credentials import fetch_authority, is_key, public_key
from dtfm.protos.identity.private_files import read_private
from dtfm.protos.identity.proof import ClockError

LOOK_SECONDS = 3.0
"""How long to look which of several coordinators answer."""
MOST_RUNS = 20
"""The number of runs to look at: the newest ones that this user remembers."""
OF_A_RUN = "*.authority.pem"
"""The key of a run's authority, beside its store."""


async def which_run(roles: Sequence[Role], folder: Path, *, or_as_member: bool = False) -> Access | None:
    """This user's access, in one of the ``roles``, to the coordinator that a command in the ``folder`` means. None: this user
    has no such role anywhere. ``or_as_member``: the role of a node suffices too. Raises ValueError if it is unclear which
    coordinator is meant, or if this user has nodes there and none of the roles."""
    members = _enrolled([Role.NODE])
    runs: dict[
        bytes, Access
    ] = {}  # the newest access to each run, the newest last; one of the roles comes before a node
    for access in [*reversed(members if or_as_member else []), *reversed(_enrolled(roles))]:
        runs.pop(access.pin, None)
        runs[access.pin] = access
    here = [pin for pin in _pins_in(folder) if pin in runs]
    if here:
        return await _chosen([runs[pin] for pin in here])
    newest = list(reversed(runs.values()))[:MOST_RUNS]
    if newest:
        return await _chosen(newest)
    if members:
        member = members[0]
        raise ValueError(
            f"this machine takes part in {_named(member)} as node {member.name!r}, and a node cannot direct a run. Who runs the "
            "coordinator can, on that machine; and whoever they invite: dtfm-coordinator invite --role operator"
        )
    return None


def _pins_in(folder: Path) -> list[bytes]:
    """The pins of the authorities whose keys are there. Keys that this user may not read are left out."""
    pins: dict[bytes, None] = {}
    for path in sorted(folder.glob(OF_A_RUN))[:MOST_RUNS]:
        try:
            key = read_private(path) if path.is_file() else b""
        except (OSError, ValueError):
            continue
        if is_key(key):
            pins[hashlib.sha256(public_key(key)).digest()] = None
    return list(pins)


async def _chosen(runs: Sequence[Access]) -> Access:
    if len(runs) == 1:
        return runs[0]
    answer = await asyncio.gather(*map(_answers, runs))
    up = [run for run, answers in zip(runs, answer, strict=True) if answers]
    if len(up) < 2:
        return (up or runs)[0]
    listed = "\n".join(f"  {number}. {_named(run)}" for number, run in enumerate(up, start=1))
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ValueError(
            f"{len(up)} runs are up:\n{listed}\nSay which: give its HOST:PORT, or call the command in that run's folder"
        )
    print(f"{len(up)} runs are up:\n{listed}", file=sys.stderr)
    number = 0
    while not 1 <= number <= len(up):
        number = int(typer.prompt("Which one (its number)", type=int, err=True))
    return up[number - 1]


async def _answers(run: Access) -> bool:
    try:
        await fetch_authority(run.addresses, run.pin, LOOK_SECONDS)
    except (ConnectionError, PermissionError, ClockError):
        return False
    return True


def _named(run: Access) -> str:
    return f"run {run.run!r} at {run.addresses[0]}" if run.run else f"the run at {run.addresses[0]}"


def _enrolled(roles: Sequence[Role]) -> list[Access]:
    """The user's accesses in these roles, the newest first."""
    return [access for access in kept(roles) if access.enrolled]

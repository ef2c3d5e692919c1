"""Shows the runs on the local network to a user without an invitation."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from dtfm.node.network.discovery import LOOK_SECONDS, runs_here
from dtfm.protos.identity.invitation import Invitation
from dtfm.protos.local_network.announcement import Announcement, fingerprint

log = logging.getLogger(__name__)


def list_runs() -> list[Announcement]:
    """Listens for some seconds, and logs the runs that are heard of. Returns them."""
    log.info("Listening for runs on this network (%.0f s) ...", LOOK_SECONDS)
    try:
        runs, others = asyncio.run(runs_here())
    except OSError as problem:
        log.warning("This network cannot be asked for runs: %s.", problem)
        return []
    for run in runs:
        log.info("%s", line_of(run), extra={"place": _fields(run)})
    if others:
        log.warning("Other announcements are not listed, as no such run answers there, or as there are too many.")
    for name in same_names(runs):
        log.warning(
            "Several runs are called %r. Only the fingerprint tells them apart. Compare it with the one that the owner of your "
            "run saw when dtfm-coordinator serve started.",
            name,
        )
    return runs


def line_of(run: Announcement) -> str:
    """A run in one line."""
    trains = f", trains {run.trains}" if run.trains else ""
    return f"  run {run.run!r}{trains}; owner's fingerprint {fingerprint(run.pin)}; at {' or '.join(run.addresses)}"


def same_names(runs: Sequence[Announcement]) -> list[str]:
    """The names that more than one of the runs has."""
    return [name for name, count in Counter(run.run for run in runs).items() if count > 1]


def tell_which(invitation: Invitation, runs: Sequence[Announcement]) -> None:
    """Logs which of the listed runs the invitation is for."""
    of = next((run for run in runs if run.pin == invitation.pin), None)
    if of is not None:
        log.info("The invitation is of run %r, fingerprint %s.", of.run, fingerprint(of.pin))
    elif runs:
        log.warning(
            "The invitation is of none of these: its owner's fingerprint is %s. It leads to %s.",
            fingerprint(invitation.pin),
            " or ".join(invitation.addresses),
        )


def _fields(run: Announcement) -> dict[str, object]:
    return {
        "run": run.run,
        "trains": run.trains,
        "fingerprint": fingerprint(run.pin),
        "authority": run.pin.hex(),
        "addresses": list(run.addresses),
    }

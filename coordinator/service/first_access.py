"""The first access to a run: the key of the user who runs the coordinator, and a first invitation."""

from __future__ import annotations

import base64
import os
from dataclasses import replace

from dtfm.coordinator.log.events import Enrolled, InvitationMade
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos.identity.access import Access, Role, keep, kept
from dtfm.protos.identity.credentials import make_key, public_key
from dtfm.protos.identity.invitation import new_secret, secret_digest

FIRST_USES = 100
"""Uses of the first invitation, if the members know each other. Among strangers each key needs an invitation of its own."""
FIRST_SECONDS = 7 * 86400.0


def local_operator(ledger: Ledger, addresses: tuple[str, ...], pin: bytes) -> list[Enrolled]:
    """Makes the user who runs this process an operator: so this user's commands and nodes on this machine need no invitation.
    The key is remembered in the user's state folder. Returns the event for this, unless the ledger has it already. Raises
    ValueError."""
    run = str(ledger.run.get("name", ""))
    for access in kept([Role.OPERATOR], pin):
        holder = ledger.access.names.get(access.name)
        if holder is not None and holder.key == _written(access.key):
            keep(replace(access, addresses=addresses, own=True, run=run))  # it is the newest now
            return []
    key = make_key()
    name = f"operator-{os.urandom(4).hex()}"
    keep(Access(addresses, pin, name, Role.OPERATOR, key, enrolled=True, own=True, run=run))
    return [Enrolled(name, Role.OPERATOR.value, _written(key), "")]


def first_invitation(
    ledger: Ledger, at: float, uses: int, *, another: bool = False
) -> tuple[InvitationMade, bytes] | None:
    """An invitation for nodes, and its secret. None if the ledger has a valid one, unless ``another`` is needed."""
    if not another and any(
        invited.role == Role.NODE and invited.is_usable(at) for invited in ledger.access.invitations.values()
    ):
        return None
    return node_invitation(at, uses, "the first nodes")


def node_invitation(at: float, uses: int, name: str) -> tuple[InvitationMade, bytes]:
    """An invitation for nodes by the coordinator itself, and its secret."""
    id, secret = new_secret()
    made = InvitationMade(
        id, secret_digest(secret), name, Role.NODE.value, at, at + FIRST_SECONDS, uses, "the coordinator"
    )
    return made, secret


def _written(key: bytes) -> str:
    return base64.b64encode(public_key(key)).decode()

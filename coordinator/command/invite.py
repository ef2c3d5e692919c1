"""``dtfm-coordinator invite``, ``revoke``, ``expel`` and ``forgive``: who may take part, look, or direct."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

from dtfm.coordinator.command.options import Json, Where
from dtfm.coordinator.command.steer import tell
from dtfm.protos.identity.access import Role

if TYPE_CHECKING:  # the commands that read a log start faster without it
    from dtfm.protos import control_pb2 as wire

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def invite(
    where: Where = "",
    name: Annotated[str, typer.Option(help="Who is invited, for people to read.")] = "",
    role: Annotated[
        Role, typer.Option(help="node: trains; viewer: looks; operator: looks, plans, invites, revokes and expels.")
    ] = Role.NODE,
    expires: Annotated[str, typer.Option(help="How long it can be used, like 30m, 12h or 7d.")] = "7d",
    uses: Annotated[int, typer.Option(min=1, help="How many may come by each.")] = 1,
    count: Annotated[int, typer.Option(min=1, max=100, help="How many invitations to make.")] = 1,
    believed: Annotated[
        bool,
        typer.Option("--believed", help="The word of nodes that come by it decides when others contradict each other."),
    ] = False,
    json_lines: Json = False,
) -> None:
    """Makes invitations: strings that let somebody join a run, each with the line to paste.

    Whoever has the string can use it, so send it as you would a password. A node needs its invitation only once.
    """
    from dtfm.coordinator.command.client import ask
    from dtfm.coordinator.log.wording import utc

    seconds = read_duration(expires)
    for _ in range(count):
        reply: wire.InviteReply = asyncio.run(
            ask(where, "Invite", name=name, role=role.value, seconds=seconds, uses=uses, believed=believed)
        )
        if json_lines:
            fields = {"id": reply.id, "role": role.value, "expires": reply.expires, "uses": uses, "believed": believed}
            told = {"invitation": reply.invitation, "line": reply.line, "leads_to": reply.leads_to, "page": reply.page}
            told |= {"run": reply.run}
            print(json.dumps({**fields, **told}))
            continue
        good = f"good for {uses} use{'s' if uses > 1 else ''} until {utc(reply.expires)}"
        print(f"Invitation {reply.id} to run {reply.run!r} (role {role.value}), {good}:")
        print(f"    {reply.line}")
        if reply.page:
            print(f"  In a browser, as often as one likes: {reply.page}")
        if role is not Role.NODE and (not reply.page or reply.page.startswith("http://127.0.0.1:")):
            print("  (the page is on the coordinator's machine alone; for others: serve --web 0.0.0.0:7480)")
    if not json_lines:
        print(f"  (leads to {reply.leads_to})")


def revoke(
    what: Annotated[
        str, typer.Argument(metavar="INVITATION-ID|NAME", help="An invitation, or the name of a node or user.")
    ],
    where: Where = "",
    json_lines: Json = False,
) -> None:
    """Ends an invitation, or cuts off a node or a user immediately."""
    tell(where, "Revoke", json_lines, {"revoked": what}, what=what)


def expel(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Its name, as `members` shows it.")],
    where: Where = "",
    reason: Annotated[str, typer.Option(help="Why, for people to read.")] = "",
    json_lines: Json = False,
) -> None:
    """Quarantines a node: training goes on without it, and it may not come back until it is forgiven.

    The same holds for all other nodes of its key, that is, of its user on that machine.
    """
    tell(where, "Expel", json_lines, {"expelled": node}, node=node, reason=reason)


def forgive(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Its name, as the event node_quarantined has it.")],
    where: Where = "",
    json_lines: Json = False,
) -> None:
    """Ends the quarantine of a node: it may come back."""
    tell(where, "Forgive", json_lines, {"forgiven": node}, node=node)


def read_duration(text: str) -> float:
    """The seconds of a text. Raises ValueError."""
    found = re.fullmatch(r"([0-9]{1,9})([smhdw])", text.strip())
    if found is None or int(found[1]) == 0:
        raise ValueError(f"--expires {text!r} is not a time; give it like 30m, 12h or 7d")
    return int(found[1]) * _SECONDS[found[2]]

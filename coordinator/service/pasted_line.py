"""The line for somebody to paste in order to join, look or direct, and where its invitation leads."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Sequence

from dtfm.protos.candidates import Address
from dtfm.protos.connection import read_address
from dtfm.protos.identity.access import Role
from dtfm.protos.identity.invitation import ID_BYTES, SECRET_BYTES
from dtfm.protos.places import guarded_places
from dtfm.protos.run_file.run_file import RunFile

_COMMANDS = {
    Role.NODE: "dtfm-node join",
    Role.VIEWER: "dtfm-coordinator watch",
    Role.OPERATOR: "dtfm-coordinator members",
}
LINK = "link"


def pasted_line(invitation: str, role: Role, run: RunFile) -> str:
    """``invitation`` may be empty: then the line is for people who have it elsewhere."""
    words = [_COMMANDS[role], *([invitation] if invitation else [])]
    if role is Role.NODE:
        tokenizer = run.message("").data.tokenizer
        adapter = run.adapter.pretrained if run.adapter is not None else ""
        places = guarded_places(run.data.places, tokenizer, run.model.pretrained, run.checkpoint.uri, adapter)
        for _, path in places:
            words += ["--allow-data", shlex.quote(path)]
    return " ".join(words)


def page_link(page: str, id: str, secret: bytes) -> str:
    """The URL that opens the ``page`` by the invitation with this id and secret. In hex, since mails cut links at other
    characters."""
    return f"{page}?{LINK}={id}{secret.hex()}"


def read_link(text: str) -> tuple[str, bytes]:
    """The id and the secret, from the text behind the link's ``=``. Raises ValueError."""
    if not re.fullmatch(f"[0-9a-f]{{{2 * (ID_BYTES + SECRET_BYTES)}}}", text):
        raise ValueError("it is not whole; copy it again")
    return text[: 2 * ID_BYTES], bytes.fromhex(text[2 * ID_BYTES :])


def where_it_leads(addresses: Sequence[str]) -> str:
    """The addresses that an invitation carries, and what to do if they are of no use on other networks."""
    listed, port = ", ".join(addresses), read_address(addresses[0])[1]
    known = [_ip_of(address) for address in addresses]
    if all(ip is not None and ip.is_loopback for ip in known):
        return f"{listed}: this machine alone, where dtfm-node join will do. For others: serve --listen 0.0.0.0:{port}"
    if all(ip is not None and not ip.is_global for ip in known):
        return (
            f"{listed}: private, for machines of the same network alone. For others, let the router forward port {port} to this "
            f"machine, and: serve --advertise PUBLIC_IP:{port}"
        )
    return listed


def _ip_of(address: str) -> Address | None:
    """The IP address. None: it is a name."""
    host = read_address(address)[0]
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.partition("%")[0])
    except ValueError:
        return None

"""What a coordinator says of itself on its local network, by multicast DNS (RFC 6762) and DNS-SD (RFC 6763): the service
``_dtfm._tcp``, and in its TXT record the run's name, dtfm's version and the hash of the authority's public key. Nothing of it is
secret, and nothing is trusted: anybody on the network can say it. It tells where to ask; who answers has to show the
authority's key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from dtfm.protos.candidates import read_candidate, write_candidate
from dtfm.protos.invitation import MOST_ADDRESSES, PIN_BYTES

SERVICE = "_dtfm._tcp.local."
MOST_RUN_CHARACTERS = 48
_MOST_VERSION_CHARACTERS = 24


@dataclass(frozen=True, slots=True)
class Announcement:
    """``addresses``: HOST:PORT. All texts are printable."""

    run: str
    version: str
    pin: bytes
    addresses: tuple[str, ...]


def write_txt(run: str, version: str, pin: bytes) -> dict[str, str]:
    return {"run": run[:MOST_RUN_CHARACTERS], "version": version[:_MOST_VERSION_CHARACTERS], "authority": pin.hex()}


def read_announcement(txt: Mapping[bytes, bytes | None], hosts: Sequence[str], port: int | None) -> Announcement:
    """Raises ValueError for what no coordinator says. Of ``hosts``, those are left out that no coordinator can have."""
    pin = bytes.fromhex((txt.get(b"authority") or b"").decode("ascii"))
    if len(pin) != PIN_BYTES:
        raise ValueError("its authority is no SHA-256")
    addresses = []
    for host in hosts[: 2 * MOST_ADDRESSES]:
        try:
            address, _ = read_candidate(write_candidate(ip_address(host), port or 0))
        except ValueError:
            continue  # a link-local one needs an interface beside it
        if not address.is_loopback:
            addresses.append(write_candidate(address, port or 0))
    if not addresses:
        raise ValueError("it has no address at which others reach it")
    run = _printable(txt.get(b"run"), MOST_RUN_CHARACTERS)
    version = _printable(txt.get(b"version"), _MOST_VERSION_CHARACTERS)
    return Announcement(run, version, pin, tuple(dict.fromkeys(addresses))[:MOST_ADDRESSES])


def _printable(text: bytes | None, most: int) -> str:
    """Without control characters, and those that change the direction of what follows."""
    decoded = (text or b"").decode(errors="replace")[:most]
    return "".join(character if character.isprintable() else "?" for character in decoded)

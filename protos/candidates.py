"""Candidates: the addresses at which a node may be reached, as IP:PORT.

A node names several, and nobody knows beforehand which of them works for whom. So a peer tries all, and keeps the one at which
the node's certificate is shown. Since members could name addresses of others, and so have every node knock there, only what can
be a node is dialled: few addresses of each, of unicast, no ports that belong to well-known services.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from dtfm.protos.connection import read_address

MOST_CANDIDATES = 8
"""Of one node."""

LEAST_PORT = 1024
HTTPS = 443
"""The one port below LEAST_PORT that is allowed: some networks let nothing else through."""

_LAN = tuple(map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")))
"""Private networks (RFC 1918, RFC 4193), and those between a provider and its customers, which overlays use (RFC 6598)."""
_THIS_NETWORK = ip_network("0.0.0.0/8")
"""Addresses of a machine that does not know its own yet (RFC 1122, section 3.2.1.3)."""

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def plain(address: Address) -> Address:
    """IPv4 that is written as IPv6, as IPv4."""
    return getattr(address, "ipv4_mapped", None) or address


def read_candidate(text: str) -> tuple[Address, int]:
    """The address and the port. Raises ValueError for one that no node may have."""
    host, port = read_address(text)
    try:
        address = ip_address(host)
    except ValueError:
        raise ValueError(
            f"{text!r} is no candidate: give the IP address, as names mean other things elsewhere"
        ) from None
    address = plain(address)
    if address.is_link_local or address.is_multicast or address.is_unspecified or _is_reserved(address):
        raise ValueError(f"{text!r} is no candidate: other machines cannot reach a node at {address}")
    if port < LEAST_PORT and port != HTTPS:
        raise ValueError(f"{text!r} is no candidate: use a port from {LEAST_PORT} on, or {HTTPS}, not {port}")
    return address, port


def way_to(address: Address, own: Iterable[str] = ()) -> str:
    """What a direct way to this address is called: "loopback", "lan" or "public". ``own`` are the candidates of the node at this
    end: where the address is one of theirs, both ends are on one machine."""
    if address.is_loopback or any(address == its for its, _ in _allowed(own)):
        return "loopback"
    return "lan" if any(address in network for network in _LAN) else "public"


def both_ends(host: str) -> tuple[str, str]:
    """The local address from which ``host`` is reached, and the host's own. Sends nothing. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0]).partition("%")[0], str(address[0]).partition("%")[0]


def origin_of(address: Address) -> str:
    """Whose connections are counted together: an IPv4 address, or the /64 of an IPv6 address, which one household has at
    least (RFC 6177)."""
    if isinstance(address, IPv6Address) and not address.is_loopback:
        return str(ip_network((int(address) >> 64 << 64, 64)))
    return str(address)


def seen_at(peer: str) -> Address | None:
    """The address in what gRPC calls a call's peer, like ``ipv4:192.0.2.1:4711`` or ``ipv6:%5B2001:db8::1%5D:4711``."""
    family, _, rest = peer.replace("%5B", "[").replace("%5D", "]").partition(":")
    if family not in ("ipv4", "ipv6"):
        return None
    try:
        return plain(ip_address(read_address(rest)[0].partition("%")[0]))
    except ValueError:
        return None


def target_of(candidates: Iterable[str], *, loopback: bool, near: Collection[Network] = ()) -> str:
    """The candidates as a target for gRPC, which tries the next one a quarter of a second after the last (RFC 8305), and keeps
    the first that shows the right certificate. Those in a network that is ``near`` come first, as a router might lead to the
    others the long way round. Candidates that no node may have are left out, and those on ``loopback`` if that is not allowed;
    empty if none is left."""
    known = [each for each in _allowed(candidates) if loopback or not each[0].is_loopback]
    known.sort(key=lambda each: not any(each[0] in network for network in near))  # the sort is stable
    if not known:
        return ""
    if all(address.version == 4 for address, _ in known):
        return "ipv4:" + ",".join(f"{address}:{port}" for address, port in known)
    # A target has one family. An IPv4 address mapped into IPv6 is dialled as IPv4 where there is no IPv6.
    mapped = (f"::ffff:{address}" if address.version == 4 else str(address) for address, _ in known)
    return "ipv6:" + ",".join(f"[{text}]:{port}" for text, (_, port) in zip(mapped, known, strict=True))


def _allowed(candidates: Iterable[str]) -> list[tuple[Address, int]]:
    found = []
    for text in list(candidates)[:MOST_CANDIDATES]:
        with suppress(ValueError):
            found.append(read_candidate(text))
    return found


def _is_reserved(address: Address) -> bool:
    if address.version == 4:
        return address.is_reserved or address in _THIS_NETWORK
    return address.is_site_local

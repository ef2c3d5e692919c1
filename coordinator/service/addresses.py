"""The addresses where others reach a coordinator, so that an invitation works where it is pasted."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from contextlib import suppress

import ifaddr

from dtfm.protos.candidates import both_ends
from dtfm.protos.connection import address_of, read_address, with_port
from dtfm.protos.identity.invitation import MOST_ADDRESSES

EVERYWHERE = ("0.0.0.0", "::")


def public_addresses(host: str, port: int, advertised: Sequence[str]) -> tuple[str, ...]:
    """The public addresses of a server that listens on ``host``. If the operator ``advertised`` some (HOST or HOST:PORT),
    these. Otherwise the host itself, or all addresses of this machine's interfaces if the server listens on all. Raises
    ValueError."""
    if advertised:
        return tuple(address_of(*read_address(with_port(text, port))) for text in advertised)[:MOST_ADDRESSES]
    if host not in EVERYWHERE:
        return (address_of(host, port),)
    found = [address_of(found, port) for found in usable(own_hosts(), ipv6=host == "::")]
    return tuple(found[:MOST_ADDRESSES]) or (address_of("127.0.0.1", port),)


def own_hosts() -> list[str]:
    """The IP addresses of this machine's interfaces, the one that faces the internet first."""
    hosts = [ip.ip if isinstance(ip.ip, str) else ip.ip[0] for adapter in ifaddr.get_adapters() for ip in adapter.ips]
    facing = []
    for somewhere in ("192.0.2.1", "2001:db8::1"):
        with suppress(OSError):
            facing.append(both_ends(somewhere)[0])
    return [*facing, *hosts]


def usable(hosts: Iterable[str], *, ipv6: bool) -> list[str]:
    """The hosts without loopback and link-local addresses, and without duplicates. ``ipv6``: whether the server listens on IPv6
    too."""
    kept = []
    for host in dict.fromkeys(hosts):
        address = ipaddress.ip_address(host.partition("%")[0])
        if address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast:
            continue
        if address.version == 4 or ipv6:
            kept.append(str(address))
    return kept

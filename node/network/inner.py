"""Which addresses are this machine's own, or of the network that it is in. A run must not make a node call such addresses."""

from __future__ import annotations

import socket
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from dtfm.node.network.addresses import interfaces
from dtfm.protos.candidates import Address, plain

_LOOKS_PUBLIC = (ip_network("168.63.129.16/32"), ip_network("192.0.0.0/24"))
"""Azure's metadata service, and Oracle's in a range that not every Python knows as reserved. The metadata services of the other
clouds have link-local or private addresses."""
_NAT64 = ip_network("64:ff9b::/96")
"""IPv4 as a network without IPv4 writes it (RFC 6052)."""


def own_addresses() -> frozenset[Address]:
    """The addresses of this machine's interfaces."""
    return frozenset(plain(ip_address(each.address.partition("%")[0])) for each in interfaces())


def is_inner(address: Address, own: Collection[Address] = ()) -> bool:
    """Whether ``address`` is one of this machine's ``own``, or outside the public internet: loopback, private, link-local, a
    cloud's metadata service, multicast, reserved. An IPv6 address counts as the IPv4 address that it carries."""
    carried = _carried(address)
    of_nobody = not carried.is_global or carried.is_multicast or any(carried in each for each in _LOOKS_PUBLIC)
    return of_nobody or carried in own or address in own


def addresses_of(host: str, port: int) -> frozenset[Address]:
    """All addresses that the name stands for now. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset(ip_address(str(where[0]).partition("%")[0]) for *_, where in found)


def _carried(address: Address) -> Address:
    address = plain(address)
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
        return address.sixtofour or (address.teredo[1] if address.teredo else address)
    return address

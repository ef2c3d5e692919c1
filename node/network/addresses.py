"""Where peers may reach this node: its candidates. A pure function of the statements of the machine and its owner."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

import ifaddr

from dtfm.protos.candidates import MOST_CANDIDATES, Address, Network, read_candidate, way_to
from dtfm.protos.connection import address_of, read_address, with_port

IDENTITY_PORTS = 70000
"""Vast names the ports that it maps to themselves by numbers from here on: VAST_TCP_PORT_70000 holds a port that is the same
inside and outside."""
MOST_IDENTITY_PORTS = 16

_OF_CONTAINERS = ("docker", "br-", "veth", "virbr", "cni", "flannel", "lxc")
"""Names of interfaces that lead into this machine's own containers begin with one of these."""

_RENTED = (("PUBLIC_IPADDR", "VAST_TCP_PORT_"), ("RUNPOD_PUBLIC_IP", "RUNPOD_TCP_PORT_"))
"""Vast and RunPod: the variables with the machine's public address, and, with a port of the container appended, the public port
that leads there."""


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    address: str
    prefix: int = 128
    """The number of leading bits that all addresses of its network share."""


def interfaces() -> list[Interface]:
    """This machine's interfaces, with IPv4 and IPv6 addresses."""
    return [
        Interface(str(adapter.name), ip.ip if isinstance(ip.ip, str) else ip.ip[0], ip.network_prefix)
        for adapter in ifaddr.get_adapters()
        for ip in adapter.ips
    ]


def near(found: Sequence[Interface]) -> tuple[Network, ...]:
    """The private networks of these interfaces. Networks of this machine's own containers are left out."""
    networks = []
    for interface in found:
        address = ip_address(interface.address.partition("%")[0])
        if way_to(address) == "lan" and not interface.name.startswith(_OF_CONTAINERS):
            prefix = min(interface.prefix, address.max_prefixlen)
            networks.append(ip_network(f"{address}/{prefix}", strict=False))
    return tuple(dict.fromkeys(networks))


def identity_ports(environment: Mapping[str, str]) -> tuple[int, ...]:
    """The ports that the host maps to themselves, to listen on."""
    numbers = range(IDENTITY_PORTS, IDENTITY_PORTS + MOST_IDENTITY_PORTS)
    ports = (_port(environment.get(f"VAST_TCP_PORT_{number}", "")) for number in numbers)
    return tuple(port for port in ports if port is not None)


def candidates(
    host: str,
    port: int,
    advertise: Sequence[str] = (),
    facing: str = "",
    opened: str = "",
    environment: Mapping[str, str] = os.environ,
    found: Callable[[], Sequence[Interface]] = interfaces,
) -> list[str]:
    """The candidates of a node that listens on ``host`` and ``port``, likelier ones first; at most MOST_CANDIDATES.

    ``advertise``: the owner's addresses, as IP or IP:PORT. ``facing``: the address of this machine that faces the coordinator.
    If it is on loopback, so are all nodes, and it alone counts. ``opened``: the candidate that the home router opened. Raises
    ValueError for an ``advertise`` that peers could not use.
    """
    named = [address_of(*read_candidate(with_port(text, port))) for text in advertise]
    if facing and ip_address(facing).is_loopback:
        return list(dict.fromkeys([*named, address_of(ip_address(facing), port)]))[:MOST_CANDIDATES]
    own: list[Address] = []
    wildcard = ip_address(host).is_unspecified
    # The interface that faces the coordinator is the likeliest.
    for interface in sorted(found(), key=lambda each: each.address != facing):
        address = ip_address(interface.address.partition("%")[0])
        if address.is_loopback or interface.name.startswith(_OF_CONTAINERS):
            continue
        if wildcard or address == ip_address(host):
            own.append(address)
    # A private address costs a peer elsewhere a moment, a public one is right for all: the first of each come first.
    own.sort(key=way_to)
    named += [*_mapped(environment, port), opened, *(address_of(address, port) for address in own)]
    return list(dict.fromkeys(filter(_usable, named)))[:MOST_CANDIDATES]


def _mapped(environment: Mapping[str, str], port: int) -> list[str]:
    """The candidates that a rented machine's environment gives for ``port``."""
    known = []
    for address, prefix in _RENTED:
        outside = _port(environment.get(f"{prefix}{port}", ""))
        if outside is None and prefix.startswith("VAST") and port in identity_ports(environment):
            outside = port
        if outside is not None and (public := environment.get(address, "").strip()):
            known.append(address_of(public, outside))
    return known


def _usable(candidate: str) -> bool:
    try:
        read_candidate(candidate)
    except ValueError:
        return False
    return True


def _port(text: str) -> int | None:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) <= 65535):
        return None
    return int(text)


def host_of(listen: str) -> str:
    """The IP address in HOST:PORT; for a name, the wildcard."""
    host, _ = read_address(listen)
    try:
        ip_address(host)
    except ValueError:
        return "0.0.0.0"
    return host


def reached_here(listen: str, port: int) -> str:
    """Where a node that listens on HOST:PORT is reached from its own machine. ``port`` is its actual port."""
    address = ip_address(host_of(listen))
    return address_of(ip_address("127.0.0.1") if address.is_unspecified else address, port)

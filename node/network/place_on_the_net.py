"""Where this machine is on the net, and the address to listen on there."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address

from dtfm.node.network.addresses import identity_ports
from dtfm.protos.candidates import both_ends, way_to
from dtfm.protos.connection import address_of, read_address, with_port
from dtfm.protos.identity.enrolment import Entry


class NoWayThere(ValueError):
    """The coordinator's name cannot be resolved, or nothing leads to its address."""


def place_on_the_net(coordinator: Entry) -> tuple[str, bool]:
    """This machine's address that faces the coordinator, and whether this machine is behind NAT.

    The coordinator's first address with a way to it counts. A loopback address counts only if it is the only one: otherwise
    other nodes are elsewhere. Sends nothing. Raises NoWayThere.
    """
    facing, problem = [], NoWayThere("the coordinator has no address")
    for address in coordinator.leads_to[0]:
        host = read_address(address)[0]
        try:
            facing.append(both_ends(host))
        except OSError as error:
            what = f"{host!r} cannot be resolved or reached ({error}); is the coordinator's address right?"
            problem = NoWayThere(what)
    if not facing:
        raise problem
    # The sort is stable.
    facing.sort(key=lambda each: ip_address(each[0]).is_loopback)
    ways = [(way_to(ip_address(here)), way_to(ip_address(there))) for here, there in facing]
    return facing[0][0], ("lan", "public") in ways  # this machine's address is private, and the coordinator's is not


def usual_listen(facing: str, number: int = 0) -> str:
    """The usual HOST:PORT to listen on: loopback for a coordinator on this machine, otherwise everywhere.

    The port is one that a rented machine's host maps to itself, if the host does that. The node with this ``number`` takes the
    port of that number. Otherwise any free port.
    """
    if ip_address(facing).is_loopback:
        return address_of(facing, 0)
    ports = identity_ports(os.environ)
    return f"0.0.0.0:{next(filter(_is_free, (*ports[number:], *ports[:number])), 0)}"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def nth_port(address: str, number: int) -> str:
    """HOST:PORT of the node with this ``number`` among several; ``address`` is the first node's. Ports count up, except 0, any
    free port. A HOST alone does not change."""
    host, colon, port = address.rpartition(":")
    if not number or not colon or not port.isdecimal() or port == "0" or (":" in host and not host.endswith("]")):
        return address
    return f"{host}:{int(port) + number}"


def resolved(advertise: str) -> str:
    """HOST[:PORT] with the host's IP address. A name would mean something else elsewhere, so it is looked up here."""
    host, port = read_address(with_port(advertise, 0))
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ValueError(
            f"--advertise {advertise}: {host!r} is not known here ({error}); give the IP address"
        ) from None
    return address_of(str(address), port) if port else str(address)

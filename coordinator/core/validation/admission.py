"""Checks of a node's introduction: its version, name, device and addresses."""

from __future__ import annotations

import contextlib
from ipaddress import ip_address

from dtfm.coordinator.core.refusal import Refused, check_number, require, shorten
from dtfm.coordinator.log.events import DeviceSeen
from dtfm.protos import PROTOCOL_VERSION, control_pb2 as wire
from dtfm.protos.candidates import MOST_CANDIDATES, read_candidate
from dtfm.protos.connection import address_of
from dtfm.protos.identity.access import NAME

MAX_NODES = 1000
MOST_FLOPS = 1e21


def check_version(theirs: int) -> None:
    """Raises Refused if the other side speaks another version of the protocol."""
    if theirs != PROTOCOL_VERSION:
        older = "node" if theirs < PROTOCOL_VERSION else "coordinator"
        raise Refused(
            wire.PROTOCOL_VERSION,
            f"the node speaks protocol version {theirs}, this coordinator {PROTOCOL_VERSION}; update dtfm on the {older}",
        )


def check_name(name: str, field: str = "name") -> None:
    """Raises Refused."""
    require(NAME.fullmatch(name) is not None, field, name, "1 to 64 letters, digits, dots, dashes and underscores")


def check_hello(hello: wire.Hello) -> DeviceSeen:
    """The node's device. Raises Refused if the node cannot join. Does not check whether its identity is taken."""
    check_version(hello.protocol_version)
    check_name(hello.node, "node")
    require(hello.relay in wire.Hello.Relay.values(), "relay", hello.relay, "one that this version knows")
    version, device = hello.package_version, hello.device
    require(len(version) <= 64, "package_version", version, "at most 64 characters")
    require(device.kind in ("cpu", "cuda"), "device.kind", device.kind, '"cpu" or "cuda"')
    require(len(device.name) <= 256, "device.name", device.name, "at most 256 characters")
    memory, host_memory = device.memory_bytes, device.host_memory_bytes
    require(0 < memory < 1 << 50, "device.memory_bytes", memory, "above 0 and below 2**50")
    require(host_memory < 1 << 50, "device.host_memory_bytes", host_memory, "below 2**50")
    check_flops(device.flops)
    return DeviceSeen(device.kind, shorten(device.name), memory, device.flops, host_memory)


def check_candidates(hello: wire.Hello, seen: str) -> tuple[str, ...]:
    """Where peers may reach the node: at the addresses that it names, and at the address ``seen`` with the port that it listens
    on. ``seen``: the address that it came from; empty: not known. Raises Refused."""
    number, most = len(hello.candidates), f"at most {MOST_CANDIDATES} of them, and a port below 65536"
    require(number <= MOST_CANDIDATES and hello.port <= 65535, "candidates", number, most)
    try:
        named = [address_of(*read_candidate(text)) for text in hello.candidates]
    except ValueError as error:
        raise Refused(wire.MALFORMED, f"candidates: {shorten(str(error))}; give it with --advertise IP:PORT") from None
    if seen and hello.port and len(named) < MOST_CANDIDATES:
        with contextlib.suppress(ValueError):
            named.append(address_of(*read_candidate(address_of(ip_address(seen), hello.port))))
    return tuple(dict.fromkeys(named))


def check_flops(flops: float, field: str = "device.flops") -> None:
    """Raises Refused for a speed that no device has."""
    check_number(field, flops, 1.0, MOST_FLOPS)

"""What a coordinator says of itself on its local network, by multicast DNS (RFC 6762) and DNS-SD (RFC 6763).

It offers the service ``_dtfm._tcp``, whose TXT record has the run's name, what it trains, and the hash of the authority's public
key. Nothing of this is secret, and nothing is believed: anybody on the network can say it. It tells where to ask, and whoever
answers there has to show the authority's key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from zeroconf import DNSAddress, DNSIncoming, DNSRecord, DNSService, DNSText, ServiceInfo

from dtfm.protos.candidates import Address, plain, read_candidate
from dtfm.protos.connection import address_of, read_address
from dtfm.protos.identity.invitation import MOST_ADDRESSES, PIN_BYTES
from dtfm.protos.printable import printable

SERVICE = "_dtfm._tcp.local."
MOST_CHARACTERS = 48
"""The longest name of a run or a model. In UTF-8 each fits into a string of a TXT record, which has at most 255 bytes."""
MOST_FOUND = 32
"""The number of announcements that one look keeps."""
MOST_OF_ONE = 8
"""The same for one machine: a liar leaves room for others."""

_LABEL = re.compile("dtfm-[0-9a-f]{16}")
_LOCAL = tuple(map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")))
"""Networks of a house or a firm (RFC 1918, RFC 4193)."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """One run. ``trains``: what, in a few words; may be empty. ``pin``: SHA-256 of the authority's SubjectPublicKeyInfo.
    ``addresses``: HOST:PORT, the likeliest first. All texts are printable, and in one line."""

    run: str
    trains: str
    pin: bytes
    addresses: tuple[str, ...]


def fingerprint(pin: bytes) -> str:
    """The beginning of the authority's hash, as people compare it."""
    text = pin.hex()[:16]
    return " ".join(text[at : at + 4] for at in range(0, len(text), 4))


def is_local(host: str) -> bool:
    """Whether it is an address of a house or a firm. Names are not, and addresses between a provider and its customers (RFC 6598)
    are not."""
    address = _read_ip(host)
    return address is not None and any(address in network for network in _LOCAL)


def service(announcement: Announcement) -> ServiceInfo:
    """Returns the records of an announcement. All its ``addresses`` have the same port."""
    hosts, ports = zip(*(read_candidate(address) for address in announcement.addresses), strict=True)
    label = _label(announcement.pin)
    txt = {
        "run": announcement.run[:MOST_CHARACTERS],
        "trains": announcement.trains[:MOST_CHARACTERS],
        "authority": announcement.pin.hex(),
    }
    return ServiceInfo(
        SERVICE,
        f"{label}.{SERVICE}",
        port=ports[0],
        properties=txt,
        server=f"{label}.local.",
        parsed_addresses=[str(host) for host in hosts],
    )


def announced_in(packet: bytes, source: str) -> list[Announcement]:
    """What a packet from the address ``source`` says of runs. Records that no coordinator sends are passed over.

    A coordinator is where its answer comes from, so this is the first of its addresses: whoever cannot forge that can lead others
    to its own addresses alone. What else the packet names follows.
    """
    incoming = DNSIncoming(packet)
    if not incoming.valid or incoming.is_query() or not is_local(source):
        return []
    said: dict[str, list[DNSRecord]] = {}
    for record in incoming.answers():
        said.setdefault(record.name.lower().partition(".")[0], []).append(record)
    found = (_read(label, records, source) for label, records in said.items() if _LABEL.fullmatch(label))
    return [announcement for announcement in found if announcement is not None][:MOST_FOUND]


def _read(label: str, records: list[DNSRecord], source: str) -> Announcement | None:
    """What a packet's records of this ``label`` say together; None if that is not a coordinator's."""
    places = [record for record in records if isinstance(record, DNSService) and record.ttl]
    texts = [record for record in records if isinstance(record, DNSText)]
    if not places or not texts:
        return None
    txt = ServiceInfo(SERVICE, f"{label}.{SERVICE}", properties=texts[0].text).properties
    pin = _read_pin(txt)
    if pin is None or _label(pin) != label:
        return None
    others = [record.address for record in records if isinstance(record, DNSAddress)]
    hosts = [source, *(str(ip_address(packed)) for packed in others[: 2 * MOST_ADDRESSES])]
    addresses = dict.fromkeys(_read_place(host, places[0].port) for host in hosts)
    if "" in list(addresses)[:1]:  # others would not be where they say, either
        return None
    return Announcement(_text(txt, b"run"), _text(txt, b"trains"), pin, tuple(filter(None, addresses))[:MOST_ADDRESSES])


class Found:
    """What was heard, a bounded amount: of each machine, the runs that it announced."""

    def __init__(self) -> None:
        self.heard: dict[tuple[str, bytes], Announcement] = {}  # by the machine's address and the authority's hash
        self.are_more = False  # whether there was no room for some

    def take(self, heard: Announcement) -> None:
        """Adds an announcement, unless the same machine has announced the same authority before."""
        machine, _ = read_address(heard.addresses[0])
        if (machine, heard.pin) in self.heard:
            return
        if len(self.heard) >= MOST_FOUND or sum(machine == known for known, _ in self.heard) >= MOST_OF_ONE:
            self.are_more = True
            return
        self.heard[machine, heard.pin] = heard


def _label(pin: bytes) -> str:
    """The name of the service's one instance, and of its host."""
    return f"dtfm-{pin.hex()[:16]}"


def _read_pin(txt: Mapping[bytes, bytes | None]) -> bytes | None:
    try:
        pin = bytes.fromhex((txt.get(b"authority") or b"").decode("ascii"))
    except ValueError:
        return None
    return pin if len(pin) == PIN_BYTES else None


def _read_place(host: str, port: int) -> str:
    """HOST:PORT; empty for one that no coordinator on this network has."""
    if not is_local(host):
        return ""
    try:
        return address_of(*read_candidate(address_of(host, port)))
    except ValueError:
        return ""


def _read_ip(host: str) -> Address | None:
    try:
        return plain(ip_address(host.partition("%")[0]))
    except ValueError:
        return None  # a name


def _text(txt: Mapping[bytes, bytes | None], key: bytes) -> str:
    return printable((txt.get(key) or b"").decode(errors="replace")[:MOST_CHARACTERS], "?")

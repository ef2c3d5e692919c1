"""The port of multicast DNS: few packets are read, and none from the internet."""

from __future__ import annotations

import pytest

from dtfm.protos.local_network import multicast as module
from dtfm.protos.local_network.multicast import (
    MOST_BYTES,
    MOST_OF_ONE,
    MOST_PACKETS,
    MOST_SENDERS,
    Nearby,
    Reader,
    multicast,
)


class Library:
    """Records the packets that the library would have read."""

    def __init__(self) -> None:
        self.read: list[tuple[bytes, tuple[str, int]]] = []

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.read.append((data, addr))


def as_it_is(library: Reader) -> Reader:
    return library


async def test_the_library_reads_what_comes_from_private_networks_alone() -> None:
    library = Library()
    nearby = Nearby(library, as_it_is)
    for host in ("8.8.4.4", "100.64.0.1", "127.0.0.1", "169.254.0.1", "203.0.113.1", "2001:db8::1", "fe80::1%2"):
        nearby.datagram_received(b"question", (host, 5353))
    assert library.read == []
    for address in (("192.168.1.2", 5353), ("fd00::2", 5353, 0, 0)):
        nearby.datagram_received(b"question", address)  # type: ignore[arg-type]
    assert library.read == [(b"question", ("192.168.1.2", 5353)), (b"question", ("fd00::2", 5353, 0, 0))]


async def test_of_a_flood_little_is_read_and_nothing_that_is_too_long() -> None:
    library = Library()
    nearby = Nearby(library, as_it_is)
    for _ in range(200):
        nearby.datagram_received(bytes(MOST_BYTES + 1), ("192.168.1.2", 5353))
    assert library.read == [], "nor does it use up what may be read"
    for _ in range(100):
        nearby.datagram_received(b"question", ("192.168.1.2", 5353))
    assert len(library.read) == MOST_OF_ONE


async def test_who_floods_keeps_nobody_else_from_being_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OF_ONE_PER_SECOND", 1e-9)
    monkeypatch.setattr(module, "PACKETS_PER_SECOND", 1e-9)
    library = Library()
    nearby = Nearby(library, as_it_is)
    for _ in range(10_000):
        nearby.datagram_received(b"flood", ("192.168.1.66", 5353))
    nearby.datagram_received(b"question", ("192.168.1.2", 5353))
    assert library.read.count((b"flood", ("192.168.1.66", 5353))) == MOST_OF_ONE
    assert library.read[-1] == (b"question", ("192.168.1.2", 5353))
    for number in range(10_000):
        nearby.datagram_received(b"forged", (f"10.0.{number // 250}.{number % 250}", 5353))
    assert len(library.read) <= MOST_PACKETS
    assert len(nearby._senders) <= MOST_SENDERS + 1


async def test_another_may_read_in_the_librarys_place() -> None:
    library, heard = Library(), list[tuple[bytes, str]]()
    nearby = Nearby(library, lambda _: lambda packet, source: heard.append((packet, source)))
    nearby.datagram_received(b"answer", ("192.168.1.2", 5353))
    assert (library.read, heard) == ([], [(b"answer", "192.168.1.2")])


@pytest.mark.parametrize("host", ["192.0.2.77", "fd00:1:2:3::77"])
async def test_an_interface_that_is_not_there_cannot_be_used(host: str) -> None:
    with pytest.raises(OSError, match=r"multicast"):
        async with multicast([host], as_it_is):
            pass

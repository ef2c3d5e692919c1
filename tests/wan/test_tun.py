"""What the emulator reads from a packet, and what it says where it cannot work."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from dtfm.scheduler.model.cluster import Cluster, Node
from tests.wan.tun import HEADER_BYTES, Envelope, envelope
from tests.wan.wan import Wan, WanUnavailable

IP_BYTES, TCP_BYTES, UDP_BYTES = 20, 32, 8
TCP_SEGMENTS, UDP_SEGMENTS = 1, 5


def packet(payload: int, transport: int, kind: int = 0, segment: int = 0, last: int = 7) -> bytes:
    """A packet from 10.77.0.1 to 10.77.0.``last`` as a TUN device gives it, with a transport header of ``transport`` bytes."""
    head = struct.pack("<BBHHHH", 1, kind, IP_BYTES + transport, segment, IP_BYTES, 16)
    ip = bytes([0x45, *bytes(11), 10, 77, 0, 1, 10, 77, 0, last])
    header = bytearray(transport)
    if transport >= 20:
        header[12] = transport // 4 << 4
    return head + ip + bytes(header) + bytes(payload)


def test_a_plain_packet_counts_as_one_segment_of_its_own_size() -> None:
    assert envelope(packet(1000, TCP_BYTES)) == Envelope(7, 1, IP_BYTES + TCP_BYTES + 1000)


@pytest.mark.parametrize(("kind", "transport"), [(TCP_SEGMENTS, TCP_BYTES), (UDP_SEGMENTS, UDP_BYTES)])
def test_a_large_packet_counts_as_the_segments_that_it_stands_for(kind: int, transport: int) -> None:
    seen = envelope(packet(3 * 1400 + 5, transport, kind, 1400))
    assert seen == Envelope(7, 4, 3 * 1400 + 5 + 4 * (IP_BYTES + transport))


@pytest.mark.parametrize("seen", [b"", bytes(HEADER_BYTES), bytes(HEADER_BYTES) + b"\x60" + bytes(60)])
def test_a_packet_that_is_not_ipv4_has_no_envelope(seen: bytes) -> None:
    assert envelope(seen) is None


def test_a_machine_without_the_tools_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WanUnavailable, match="apt-get install iproute2"):
        Wan(Cluster((Node("n0", 1, 1),), np.zeros((1, 1)), np.zeros((1, 1)))).__enter__()

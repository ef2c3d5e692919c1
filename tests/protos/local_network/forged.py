"""Packets of multicast DNS as a liar might send them."""

from __future__ import annotations

from ipaddress import ip_address

from zeroconf import DNSAddress, DNSOutgoing, DNSPointer, DNSRecord, DNSService, DNSText

from dtfm.protos.local_network.announcement import SERVICE

PIN = bytes(range(32))
LABEL = f"dtfm-{PIN.hex()[:16]}"
RESPONSE, SRV, TXT, A, AAAA, PTR, IN = 0x8400, 33, 16, 1, 28, 12, 1


def packet(*records: DNSRecord) -> bytes:
    """What somebody sends who answers with these records."""
    out = DNSOutgoing(RESPONSE)
    for record in records:
        out.add_answer_at_time(record, 0)
    (whole,) = out.packets()
    return whole


def forged(
    *,
    label: str = LABEL,
    port: int = 7400,
    hosts: tuple[str, ...] = (),
    authority: bytes = PIN.hex().encode(),
    run: bytes = b"stories",
    ttl: int = 120,
) -> bytes:
    """What a liar sends."""
    strings = [b"run=" + run, b"trains=llama", b"authority=" + authority]
    text = b"".join(bytes([len(each)]) + each for each in strings)
    server = f"{label}.local."
    addresses = [
        DNSAddress(server, A if ip.version == 4 else AAAA, IN, ttl, ip.packed) for ip in map(ip_address, hosts)
    ]
    return packet(
        DNSPointer(SERVICE, PTR, IN, ttl, f"{label}.{SERVICE}"),
        DNSService(f"{label}.{SERVICE}", SRV, IN, ttl, 0, 0, port, server),
        DNSText(f"{label}.{SERVICE}", TXT, IN, ttl, text),
        *addresses,
    )

"""``python -m tests.wan.impostor PIN ADDRESS``: lies to the local network by multicast DNS.

At the first question for runs it sends 10,000 answers, and at each later one some more. They tell of runs that do not exist,
under names that would control a terminal. Some claim that the authority with this PIN is at ADDRESS, its own, or at others. Some
packets are too long, and some are broken. It listens at its address with another authority's key, and counts the bytes that
callers send after the handshake: ``told N bytes``.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
import sys
import tempfile
from contextlib import suppress
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

from dtfm.protos.identity.credentials import make_authority, make_key
from tests.protos.local_network.forged import forged

GROUP, PORT = "224.0.0.251", 5353
FLOOD, LATER = 10_000, 200


def lie(pin: bytes, draw: random.Random) -> bytes:
    """One answer, as this authority or as another."""
    other = draw.randbytes(32)
    hosts = tuple(
        str(ip_address(draw.choice(["10.0.0.0", "127.0.0.0", "8.8.4.0"])) + draw.randrange(250)) for _ in range(4)
    )
    names = (b"\x1b[2J\x1b[1;1Hrun", b"two\r\nlines", "\u202e\u2066gnp.nur".encode(), b"test", b"x" * 200)
    shown = pin if draw.random() < 0.2 else other
    port = draw.choice([7400, 7400, 22, 0, 65535])
    label = f"dtfm-{draw.choice([shown, pin, other]).hex()[:16]}"
    packet = forged(label=label, port=port, hosts=hosts, authority=shown.hex().encode(), run=draw.choice(names))
    if draw.random() < 0.1:
        return packet + draw.randbytes(draw.choice([1, 8000, 60_000]))
    if draw.random() < 0.1:
        broken = bytearray(packet)
        broken[draw.randrange(len(broken))] = draw.randrange(256)
        return bytes(broken)
    return packet


def other_key() -> ssl.SSLContext:
    """Of a server that shows another authority's key."""
    own = make_authority(make_key(), datetime.now(UTC))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(own.key + own.certificate)
        context.load_cert_chain(file.name)
    return context


async def serve() -> None:
    """Listens, and prints what it is told."""

    async def told(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard = b""
        with suppress(ConnectionResetError):
            heard = await reader.read(1 << 16)
        print(f"told {len(heard)} bytes", flush=True)
        writer.close()

    server = await asyncio.start_server(told, "0.0.0.0", 7400, ssl=other_key())
    await server.serve_forever()


def answer(pin: bytes, address: str) -> None:
    """Answers each question that comes by multicast."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        own.bind(("", PORT))
        group = socket.inet_aton(GROUP) + socket.inet_aton(address)
        own.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        own.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
        own.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 0)
        own.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, struct.pack("b", 1))
        print("here", file=sys.stderr, flush=True)
        draw, count = random.Random(7), FLOOD
        while True:
            question, _ = own.recvfrom(1 << 16)
            if question[2] & 0x80 or b"_dtfm" not in question:
                continue
            for _ in range(count):
                own.sendto(lie(pin, draw), (GROUP, PORT))
            count = LATER
            print("lied", flush=True)


async def main(pin: bytes, address: str) -> None:
    await asyncio.gather(serve(), asyncio.to_thread(answer, pin, address))


if __name__ == "__main__":
    asyncio.run(main(bytes.fromhex(sys.argv[1]), sys.argv[2]))

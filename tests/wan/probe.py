"""Measures links from inside a namespace; check.py starts one probe per node: ``python -m tests.wan.probe ADDRESS``.

It reads orders as JSON lines, and answers each with one line:
``{"echo": address}``: the shortest of some UDP round trips, in seconds;
``{"flood": address, "count": n}``: the share of n datagrams that came back;
``{"pour": address, "rate": r, "seconds": s}``: sends datagrams at r bytes per second, which is more than the link takes, for s
seconds; the answer is the bytes of IP packets per second that arrived;
``{"connect": address, "seconds": s}``: the bytes of payload per second that a TCP connection carried in the second half of s
seconds.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass

ECHO_PORT, POUR_PORT, COUNT_PORT, SINK_PORT = 5000, 5001, 5002, 5003
ECHOES = 3
PATIENCE_SECONDS = 10.0
FLOOD_PAUSE_SECONDS, FLOOD_END_SECONDS = 0.0005, 0.5
SEGMENT_BYTES, HEADER_BYTES = 1400, 28
MOST_SEGMENTS = 40
_UDP_SEGMENT, _UDP_GRO = 103, 104  # linux/udp.h: many datagrams in one call, in and out
_CHUNK = bytes(256 << 10)
_NUMBER = struct.Struct("!d")


@dataclass(slots=True)
class Poured:
    """What one sender has sent: the number of bytes after the first packet, and when the first and the last packet came."""

    first: float
    last: float
    count: int = 0


def answer_echoes(address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as echo:
        echo.bind((address, ECHO_PORT))
        while True:
            datagram, sender = echo.recvfrom(2048)
            echo.sendto(datagram, sender)


def count_pours(address: str, poured: dict[str, Poured]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as pool:
        pool.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
        pool.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        pool.bind((address, POUR_PORT))
        buffer = bytearray(1 << 16)
        while True:
            size, sender = pool.recvfrom_into(buffer)
            now = time.monotonic()
            seen = poured.get(sender[0])
            if seen is None:
                poured[sender[0]] = Poured(now, now)
            else:
                seen.last = now
                seen.count += size + HEADER_BYTES * -(-size // SEGMENT_BYTES)


def tell_counts(address: str, poured: dict[str, Poured]) -> None:
    """Sends to each process that connects the rate at which its datagrams came."""
    with socket.create_server((address, COUNT_PORT), backlog=64) as server:
        while True:
            connection, sender = server.accept()
            seen = poured.pop(sender[0], None)
            rate = seen.count / (seen.last - seen.first) if seen and seen.last > seen.first else 0.0
            with connection, contextlib.suppress(OSError):
                connection.sendall(_NUMBER.pack(rate))


def swallow(connection: socket.socket) -> None:
    """Reads for the time that the sender names, and answers with the rate over the second half of it."""
    with connection, contextlib.suppress(OSError):
        (seconds,) = _NUMBER.unpack(connection.recv(_NUMBER.size, socket.MSG_WAITALL))
        began = time.monotonic()
        count, half = 0, 0.0
        buffer = bytearray(1 << 20)
        while (now := time.monotonic()) < began + seconds:
            got = connection.recv_into(buffer)
            if not got:
                return
            if half:
                count += got
            elif time.monotonic() >= began + seconds / 2:
                half = time.monotonic()
        connection.sendall(_NUMBER.pack(count / (now - half) if now > half > 0 else 0.0))


def serve_sink(address: str) -> None:
    with socket.create_server((address, SINK_PORT), backlog=64) as server:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=swallow, args=(connection,), daemon=True).start()


def echo(address: str) -> float:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.settimeout(PATIENCE_SECONDS)
        trips = []
        for number in range(ECHOES):
            began = time.perf_counter()
            out.sendto(str(number).encode(), (address, ECHO_PORT))
            out.recv(64)
            trips.append(time.perf_counter() - began)
        return min(trips)


def flood(address: str, count: int) -> float:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        came = 0
        # So few are on their way at a time that no buffer is full: only the link loses any.
        out.settimeout(FLOOD_PAUSE_SECONDS)
        for _ in range(count):
            out.sendto(bytes(64), (address, ECHO_PORT))
            with contextlib.suppress(TimeoutError):
                out.recv(64)
                came += 1
        out.settimeout(FLOOD_END_SECONDS)
        with contextlib.suppress(TimeoutError):
            while came < count:
                out.recv(64)
                came += 1
        return came / count


def pour(address: str, rate: float, seconds: float) -> float:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, SEGMENT_BYTES)
        out.connect((address, POUR_PORT))
        segments = min(max(round(rate * 0.005 / SEGMENT_BYTES), 1), MOST_SEGMENTS)
        packet = bytes(segments * SEGMENT_BYTES)
        began = time.monotonic()
        sent = 0
        while (passed := time.monotonic() - began) < seconds:
            if sent > passed * rate:
                time.sleep(0.001)
                continue
            out.send(packet)
            sent += len(packet)
    # The connection waits in the same queue, so it opens after all datagrams have passed.
    with socket.create_connection((address, COUNT_PORT), timeout=PATIENCE_SECONDS) as answer:
        return float(_NUMBER.unpack(answer.recv(_NUMBER.size, socket.MSG_WAITALL))[0])


def connect(address: str, seconds: float) -> float:
    with socket.create_connection((address, SINK_PORT), timeout=PATIENCE_SECONDS) as out:
        out.settimeout(seconds + PATIENCE_SECONDS)
        out.sendall(_NUMBER.pack(seconds))
        answer: list[float] = []

        def listen() -> None:
            with contextlib.suppress(OSError):
                answer.extend(_NUMBER.unpack(out.recv(_NUMBER.size, socket.MSG_WAITALL)))

        listener = threading.Thread(target=listen)
        listener.start()
        with contextlib.suppress(OSError):
            while not answer:
                out.sendall(_CHUNK)
        listener.join()
        return answer[0]


def obey(order: dict[str, object]) -> float:
    match order:
        case {"echo": str(address)}:
            return echo(address)
        case {"flood": str(address), "count": int(count)}:
            return flood(address, count)
        case {"pour": str(address), "rate": float(rate), "seconds": float(seconds)}:
            return pour(address, rate, seconds)
        case {"connect": str(address), "seconds": float(seconds)}:
            return connect(address, seconds)
    raise AssertionError(order)


def main() -> None:
    address = sys.argv[1]
    poured: dict[str, Poured] = {}
    for target, arguments in (
        (answer_echoes, (address,)),
        (count_pours, (address, poured)),
        (tell_counts, (address, poured)),
        (serve_sink, (address,)),
    ):
        threading.Thread(target=target, args=arguments, daemon=True).start()
    lock = threading.Lock()

    def work(line: str) -> None:
        order = json.loads(line)
        try:
            result = {"id": order["id"], "value": obey(order)}
        except OSError as error:
            result = {"id": order["id"], "problem": str(error)}
        with lock:
            print(json.dumps(result), flush=True)

    print(json.dumps({"id": "ready"}), flush=True)
    for line in sys.stdin:
        threading.Thread(target=work, args=(line,), daemon=True).start()


if __name__ == "__main__":
    main()

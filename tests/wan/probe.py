"""Measures from inside a namespace; check.py starts one per node: ``python -m tests.wan.probe ADDRESS``.

Answers UDP datagrams on port 5000, swallows TCP connections on port 5001, and obeys JSON lines: {"echo": address} gives the
shortest of some round trips in seconds, {"send": address, "seconds": s, "ramp": r} what of s seconds of TCP arrived after
its first r, in bytes per second, and {"flood": address, "count": n} the share of n datagrams that came back.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import threading
import time

ECHO_PORT, SINK_PORT = 5000, 5001
ECHOES = 5
PATIENCE_SECONDS = 5.0
_CHUNK = bytes(256 << 10)
_TIMES = struct.Struct("!dd")


def answer_echoes(address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as echo:
        echo.bind((address, ECHO_PORT))
        while True:
            datagram, sender = echo.recvfrom(2048)
            echo.sendto(datagram, sender)


def swallow(connection: socket.socket) -> None:
    """Counts what arrives between the ramp's end and the end, and answers with the rate."""
    with connection, contextlib.suppress(ConnectionError):
        seconds, ramp = _TIMES.unpack(connection.recv(_TIMES.size, socket.MSG_WAITALL))
        buffer = memoryview(bytearray(1 << 20))
        began = time.monotonic()
        first = last = 0.0
        count = 0
        while got := connection.recv_into(buffer):
            last = time.monotonic()
            if not first and last - began >= ramp:
                first = last
            elif first:
                count += got
            if last - began >= seconds:
                break
        connection.sendall(struct.pack("!d", count / (last - first) if last > first > 0 else 0.0))


def serve_sink(sink: socket.socket) -> None:
    while True:
        connection, _ = sink.accept()
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


def send(address: str, seconds: float, ramp: float) -> float:
    with socket.create_connection((address, SINK_PORT), timeout=PATIENCE_SECONDS) as out:
        out.settimeout(seconds + PATIENCE_SECONDS)
        out.sendall(_TIMES.pack(seconds, ramp))
        rates: list[float] = []

        def listen() -> None:
            with contextlib.suppress(OSError):
                rates.extend(struct.unpack("!d", out.recv(8, socket.MSG_WAITALL)))

        listener = threading.Thread(target=listen)
        listener.start()
        with contextlib.suppress(ConnectionError, TimeoutError):
            while not rates:
                out.sendall(_CHUNK)
        listener.join()
        return rates[0] if rates else 0.0


def flood(address: str, count: int) -> float:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.settimeout(0.5)
        for _ in range(count):
            out.sendto(bytes(64), (address, ECHO_PORT))
        came = 0
        with contextlib.suppress(TimeoutError):
            while came < count:
                out.recv(64)
                came += 1
        return came / count


def obey(order: dict[str, object]) -> float:
    match order:
        case {"echo": str(address)}:
            return echo(address)
        case {"send": str(address), "seconds": float(seconds), "ramp": float(ramp)}:
            return send(address, seconds, ramp)
        case {"flood": str(address), "count": int(count)}:
            return flood(address, count)
    raise AssertionError(order)


def main() -> None:
    address = sys.argv[1]
    sink = socket.create_server((address, SINK_PORT), backlog=64)
    threading.Thread(target=answer_echoes, args=(address,), daemon=True).start()
    threading.Thread(target=serve_sink, args=(sink,), daemon=True).start()
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

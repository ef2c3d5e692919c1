"""The process between the namespaces: ``python -m tests.wan.emulator``, started by wan.py, which talks JSON lines to it.

First line in: {"addresses", "links": [[source, destination, link], ...], "up", "down", "seed"}, with nodes by number and a
link's fields as in shape.Link. First line out: {"namespaces": [descriptor, ...]}, or {"unavailable": reason}. Later lines in:
{"link": [source, destination, link]} or {"traffic": true}; each is answered by one line out. The process ends when its standard
input does. Its namespaces and devices have no names, so they end with it.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import random
import select
import sys
import time
from dataclasses import asdict
from typing import Any

from tests.wan.shape import Link, Shape
from tests.wan.tun import LARGEST_PACKET, Endpoint, envelope, open_endpoint

PACKETS_PER_TURN = 32
"""The most packets read from one device before the other devices, and the packets that are due, get their turn."""


class Emulator:
    """Moves packets from device to device when they are due."""

    def __init__(self, endpoints: list[Endpoint], numbers: dict[int, int], shape: Shape) -> None:
        """``numbers``: by the last byte of its address, the number of each endpoint."""
        self._tuns = [endpoint.tun for endpoint in endpoints]
        self._source = {tun: number for number, tun in enumerate(self._tuns)}
        self._numbers = numbers
        self._shape = shape
        # (due, sequence, destination, size, packet, whether it has passed the destination's downlink)
        self._heap: list[tuple[float, int, int, int, bytes, bool]] = []
        self._sequence = 0

    def run(self, control: int) -> None:
        """Runs until ``control`` ends."""
        while True:
            now = time.monotonic()
            self._deliver(now)
            wait = max(self._heap[0][0] - time.monotonic(), 0) if self._heap else None
            # select waits with a precision of microseconds; poll and epoll round up to milliseconds.
            for ready in select.select([control, *self._tuns], [], [], wait)[0]:
                if ready != control:
                    self._take(ready)
                elif not self._obey(control):
                    return

    def _take(self, tun: int) -> None:
        source = self._source[tun]
        with contextlib.suppress(BlockingIOError):
            for _ in range(PACKETS_PER_TURN):
                packet = os.read(tun, LARGEST_PACKET)
                seen = envelope(packet)
                destination = None if seen is None else self._numbers.get(seen.destination)
                if seen is None or destination is None:
                    continue
                due = self._shape.send(source, destination, seen.size, seen.segments, time.monotonic())
                if due is not None:
                    self._push(due, destination, seen.size, packet, False)

    def _deliver(self, now: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= now:
            due, _, destination, size, packet, through = heapq.heappop(heap)
            if not through:
                later = self._shape.receive(destination, size, due)
                if later is None:
                    continue
                if later > now:
                    self._push(later, destination, size, packet, True)
                    continue
            with contextlib.suppress(BlockingIOError):  # as in any network, a full receiver loses packets
                os.write(self._tuns[destination], packet)

    def _push(self, due: float, destination: int, size: int, packet: bytes, through: bool) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (due, self._sequence, destination, size, packet, through))

    def _obey(self, control: int) -> bool:
        line = _read_line(control)
        if not line:
            return False
        order = json.loads(line)
        if "link" in order:
            source, destination, link = order["link"]
            self._shape.set_link(source, destination, Link(**link))
            _answer({})
        else:
            _answer({"traffic": [[*pair, asdict(seen)] for pair, seen in self._shape.traffic().items()]})
        return True


def _read_line(descriptor: int) -> bytes:
    """Reads byte by byte, so that select still sees what comes after the line."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            return b""
        line += byte
    return bytes(line)


def _answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    control = sys.stdin.fileno()
    line = _read_line(control)
    if not line:
        return
    orders = json.loads(line)
    try:
        endpoints = [open_endpoint(address) for address in orders["addresses"]]
    except OSError as error:
        _answer({"unavailable": str(error)})
        return
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # a late packet is a wrong measurement
    links = {(source, destination): Link(**link) for source, destination, link in orders["links"]}
    shape = Shape(links, orders["up"], orders["down"], random.Random(orders["seed"]).random)
    numbers = {int(address.rpartition(".")[2]): number for number, address in enumerate(orders["addresses"])}
    _answer({"namespaces": [endpoint.namespace for endpoint in endpoints]})
    Emulator(endpoints, numbers, shape).run(control)


if __name__ == "__main__":
    main()

"""Tensor streams beside a plain socket: ``python -m tests.bench.stream [--json] [--only loopback | wan]``.

Two processes exchange 64 MiB tensors over one long-lived stream. It is frames through gRPC (ours), or a plain Python socket
that always sends from and receives into the same memory (``recv_into``). Both run in the clear, and with certificates on both
sides; there the socket is one of Python's ssl.

On loopback the speed is measured, and the CPU seconds per GB of both ends together. Then the same is measured over an emulated
link (tests/wan) of 100 Mbit/s and 100 ms each way, in the clear. The ways alternate. A ratio is the median of the ratios within
each turn, other values are medians over turns. The first turn opens the streams and does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import PIPE, Popen
from typing import Any

import numpy as np

from dtfm.protos.identity.credentials import Identity
from dtfm.scheduler.model.cluster import Cluster, Node
from tests.bench.rows import Row, show
from tests.bench.stream_end import RECEIVER, TENSOR_BYTES, WAYS, identity_line
from tests.cluster.launch import ROOT
from tests.protos.members import member
from tests.wan.wan import Wan, WanUnavailable

CLEAR = WAYS[:2]
LOOPBACK_TURNS, LOOPBACK_TENSORS = 11, 8
WAN_TURNS, WAN_TENSORS = 3, 2
WAN_LATENCY_SECONDS, WAN_RATE = 0.1, 100e6 / 8

#: start(end, command, options of Popen): end 0 sends, 1 receives.
Start = Callable[..., "Popen[str]"]


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one way in one turn: megabytes per second, and CPU seconds per gigabyte of both ends together."""

    speed: float
    cpu: float

    def of(self, measure: str) -> float:
        return self.speed if measure == "speed" else self.cpu


class End:
    """A running stream_end process."""

    def __init__(self, address: str, process: Popen[str], identity: Identity) -> None:
        self._address = address
        self._process = process
        assert process.stdin is not None
        process.stdin.write(identity_line(identity))
        process.stdin.flush()
        self._ports = self._read()

    def address(self, way: str) -> str:
        return f"{self._address}:{int(self._ports[way])}"

    def send(self, way: str, address: str, tensors: int) -> float:
        """Sends ``tensors`` tensors to another end; returns the seconds until all have arrived."""
        return self._ask({"send": way, "to": address, "tensors": tensors})

    def cpu(self) -> float:
        """The CPU seconds that the process has used so far."""
        return self._ask({})

    def _ask(self, order: dict[str, Any]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()["seconds"]

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "an end of the stream ended"
        answer: dict[str, float] = json.loads(line)
        return answer


@contextmanager
def two_ends(addresses: tuple[str, str], start: Start) -> Iterator[tuple[End, End]]:
    """Starts the sending and the receiving end, each with ``start(which, command, **options of Popen)``."""
    processes = [
        start(
            which,
            [sys.executable, "-m", "tests.bench.stream_end", address],
            cwd=ROOT,
            stdin=PIPE,
            stdout=PIPE,
            text=True,
        )
        for which, address in enumerate(addresses)
    ]
    try:
        sender, receiver = (
            End(*each) for each in zip(addresses, processes, (member("sender"), member(RECEIVER)), strict=True)
        )
        yield sender, receiver
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def take_turns(ways: tuple[str, ...], sender: End, receiver: End, turns: int, tensors: int) -> dict[str, list[Turn]]:
    taken: dict[str, list[Turn]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way in ways:
            cpu = sender.cpu() + receiver.cpu()
            seconds = sender.send(way, receiver.address(way), tensors)
            cpu = sender.cpu() + receiver.cpu() - cpu
            size = tensors * TENSOR_BYTES
            if turn:
                taken[way].append(Turn(size / seconds / 1e6, cpu / size * 1e9))
    return taken


def rows(where: str, taken: dict[str, list[Turn]]) -> list[Row]:
    found = []
    for measure, unit in (("speed", "MB/s"), ("CPU", "s/GB")):
        for our_way in (way for way in taken if way.startswith("ours")):
            their_way = our_way.replace("ours", "socket")
            ours, theirs = ([turn.of(measure) for turn in taken[way]] for way in (our_way, their_way))
            against = f"{where}: {their_way}, {measure}"
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            found.append(Row(against, statistics.median(theirs), unit))
            found.append(Row(f"{where}: {our_way}, {measure}", statistics.median(ours), unit, against, ratio))
    return found


def on_loopback() -> list[Row]:
    def start(_: int, command: list[str], **options: Any) -> Popen[str]:
        started: Popen[str] = Popen(command, **options)
        return started

    with two_ends(("127.0.0.1", "127.0.0.1"), start) as ends:
        return rows("loopback", take_turns(WAYS, *ends, LOOPBACK_TURNS, LOOPBACK_TENSORS))


def on_wan() -> list[Row]:
    """Measures over the emulated link. Raises WanUnavailable."""
    apart = np.array([[0, 1], [1, 0]])
    network = Cluster((Node("n0", 1, 1), Node("n1", 1, 1)), apart * WAN_LATENCY_SECONDS, apart * WAN_RATE)
    with Wan(network) as wan:
        addresses = (wan.address("n0"), wan.address("n1"))

        def start(which: int, command: list[str], **options: Any) -> Popen[str]:
            return wan.run(f"n{which}", command, **options)

        with two_ends(addresses, start) as ends:
            return rows("100 ms x 100 Mbit/s", take_turns(CLEAR, *ends, WAN_TURNS, WAN_TENSORS))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--only", choices=("loopback", "wan"), help="leave out the other")
    arguments = parser.parse_args()
    found = [] if arguments.only == "wan" else on_loopback()
    if arguments.only != "loopback":
        try:
            found += on_wan()
        except WanUnavailable as reason:
            print(f"No network can be emulated here: {reason}", file=sys.stderr)
            show("Streams of 64 MiB tensors", found, arguments.json)
            return 2
    show("Streams of 64 MiB tensors", found, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks that the emulated network is as its file says.

It measures round trips and rates of UDP datagrams from inside the namespaces. (What TCP makes of a link does not concern the
emulator.) A benchmark calls ``check`` before it trusts the network.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from tests.wan.wan import Wan

TRIP_TOLERANCE, TRIP_SLACK_SECONDS = 0.05, 0.003
"""A round trip may be wrong by 5% and 3 ms, which is what the kernel, Python and a busy machine add."""
RATE_TOLERANCE = 0.05
POUR_SECONDS = 0.8
OVERLOAD = 1.3
LOOKED_AT_AGAIN = 4

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Finding:
    """One direction of a pair: the round trip in seconds and the rate in bytes per second, configured and measured."""

    source: str
    destination: str
    trip: float
    trip_measured: float
    rate: float
    rate_measured: float

    @property
    def agrees(self) -> bool:
        trip_error = abs(self.trip_measured - self.trip)
        rate_error = abs(self.rate_measured - self.rate)
        return (
            trip_error <= TRIP_TOLERANCE * self.trip + TRIP_SLACK_SECONDS and rate_error <= RATE_TOLERANCE * self.rate
        )


class Probes:
    """One probe process per node of a Wan."""

    def __init__(self, wan: Wan) -> None:
        self._wan = wan
        self._probes: dict[str, Popen[str]] = {}

    def __enter__(self) -> Probes:
        for name in self._wan.names:
            command = [sys.executable, "-m", "tests.wan.probe", self._wan.address(name)]
            self._probes[name] = self._wan.run(
                name, command, cwd=Path(__file__).parents[2], stdin=PIPE, stdout=PIPE, text=True
            )
        for name in self._probes:
            self._read(name)
        return self

    def __exit__(self, *error: object) -> None:
        for probe in self._probes.values():
            probe.kill()
            probe.wait(10)
            for stream in (probe.stdin, probe.stdout):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def all(self, orders: Mapping[Pair, dict[str, Any]]) -> dict[Pair, float]:
        """Carries out all orders at the same time, each at its pair's source. A probe that met a problem gives NaN."""
        results: dict[Pair, float] = {}
        for (source, destination), order in orders.items():
            probe = self._probes[source]
            assert probe.stdin is not None
            probe.stdin.write(json.dumps({"id": destination, **order}) + "\n")
            probe.stdin.flush()
        for source, _ in orders:
            answer = self._read(source)
            results[source, answer["id"]] = answer.get("value", float("nan"))
        return results

    def echo(self, pairs: list[Pair]) -> dict[Pair, float]:
        """Round trips in seconds."""
        return self.all({pair: {"echo": self._wan.address(pair[1])} for pair in pairs})

    def pour(self, pairs: list[Pair]) -> dict[Pair, float]:
        """What gets through when more is sent than the link takes, in bytes of IP packets per second; all pairs at once."""
        orders = {}
        for pair in pairs:
            rate = self._wan.link(*pair).rate * OVERLOAD
            orders[pair] = {"pour": self._wan.address(pair[1]), "rate": rate, "seconds": POUR_SECONDS}
        return self.all(orders)

    def connect(self, pair: Pair, seconds: float) -> float:
        """TCP's payload in bytes per second, over the second half of ``seconds``."""
        return self.all({pair: {"connect": self._wan.address(pair[1]), "seconds": float(seconds)}})[pair]

    def flood(self, pair: Pair, count: int) -> float:
        """The share of small datagrams that came back."""
        return self.all({pair: {"flood": self._wan.address(pair[1]), "count": count}})[pair]

    def _read(self, name: str) -> dict[str, Any]:
        stdout = self._probes[name].stdout
        assert stdout is not None
        line = stdout.readline()
        assert line, f"the probe of {name} ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


def rounds(names: tuple[str, ...]) -> Iterator[list[Pair]]:
    """All ordered pairs, in rounds in which each node has one partner, as in a round-robin tournament."""
    ring: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        couples = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [pair for a, b in couples if a and b for pair in ((a, b), (b, a))]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def check(wan: Wan) -> list[Finding]:
    """Measures every link between nodes, in rounds in which each node sends to one other node and receives from it.

    A few links that disagree are measured once more, alone: a busy machine is wrong now and then, a wrong network always.
    """
    with Probes(wan) as probes:
        findings = [found for disjoint in rounds(wan.network.ids) for found in _measure(wan, probes, disjoint)]
        again = [(number, found) for number, found in enumerate(findings) if not found.agrees]
        for number, found in again[:LOOKED_AT_AGAIN]:
            findings[number] = _measure(wan, probes, [(found.source, found.destination)])[0]
    return findings


def _measure(wan: Wan, probes: Probes, pairs: list[Pair]) -> list[Finding]:
    trips, rates = probes.echo(pairs), probes.pour(pairs)
    return [
        Finding(a, b, wan.link(a, b).latency + wan.link(b, a).latency, trips[a, b], wan.link(a, b).rate, rates[a, b])
        for a, b in pairs
    ]

"""Computes when a packet arrives: queues, rates, delays and losses in virtual time. No clock and no I/O; all units are seconds
and bytes.

A packet from ``source`` to ``destination`` passes the source's uplink (where that has a limit), the link between the two, the
link's latency, and the destination's downlink. Uplink, link and downlink are queues that are served at their rates. A full queue
drops the packet (drop-tail).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

LEAST_QUEUE_BYTES = 64 << 10
"""Room for the largest packet that a sender makes. On a slow link, more room would mean seconds of waiting."""
QUEUE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a pair: one-way latency in seconds, rate in bytes of IP packets per second (0: nothing passes), the most
    bytes that may wait, the share of packets that are lost, and the size in bytes from which on packets are swallowed (0: none
    is), as where a path is narrower than its ends know. Raises ValueError for an impossible number."""

    latency: float
    rate: float
    queue_bytes: int
    loss: float = 0.0
    swallows_from: int = 0

    def __post_init__(self) -> None:
        for name in ("latency", "rate", "queue_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be a finite number, 0 or above")
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss is {self.loss}; it must be from 0 to 1")


def usual_queue_bytes(latency: float, rate: float) -> int:
    """The bytes that pass in a round trip and a tenth of a second, so that one TCP connection can fill the link."""
    return max(LEAST_QUEUE_BYTES, math.ceil(rate * (2 * latency + QUEUE_SECONDS)))


@dataclass(slots=True)
class Queue:
    """A queue served at ``rate`` bytes per second. ``free_at``: when all that it has accepted will have left."""

    rate: float
    bound: int
    free_at: float = -math.inf

    def admits(self, size: int, now: float) -> bool:
        """Whether there is room for a packet of ``size``. An empty queue takes any packet."""
        waiting = (self.free_at - now) * self.rate
        return self.rate > 0 and (waiting <= 0 or waiting + size <= self.bound)

    def leave(self, size: int, now: float) -> float:
        """Accepts a packet that comes at ``now``; returns when its last byte will have left."""
        self.free_at = max(self.free_at, now) + size / self.rate
        return self.free_at


@dataclass(slots=True)
class Traffic:
    """What has been sent over one link since the start: the bytes and packets that passed, and the packets dropped or lost."""

    bytes: int = 0
    packets: int = 0
    dropped: int = 0


@dataclass(slots=True)
class _Way:
    link: Link
    queue: Queue
    traffic: Traffic = field(default_factory=Traffic)
    last_arrival: float = -math.inf


class Shape:
    """The state of all links of a network. ``up`` and ``down``: each node's limit in bytes per second, or None."""

    def __init__(
        self,
        links: dict[tuple[int, int], Link],
        up: list[float | None],
        down: list[float | None],
        draw: Callable[[], float],
    ) -> None:
        """``draw`` returns random numbers from 0 to below 1, which decide losses."""
        self._ways = {pair: _Way(link, Queue(link.rate, link.queue_bytes)) for pair, link in links.items()}
        self._up = [_limit(rate) for rate in up]
        self._down = [_limit(rate) for rate in down]
        self._draw = draw

    def set_link(self, source: int, destination: int, link: Link) -> None:
        """Changes a link from now on. It does not change when packets arrive that it has accepted."""
        way = self._ways[source, destination]
        way.link = link
        way.queue.rate, way.queue.bound = link.rate, link.queue_bytes

    def send(self, source: int, destination: int, size: int, segments: int, now: float) -> float | None:
        """Returns when a packet of ``segments`` segments comes to the destination's downlink; None: it is dropped.

        If one segment is lost, the whole packet is. So a connection sees as many losses as with single segments, but longer
        ones.
        """
        way = self._ways.get((source, destination))
        if way is None:
            return None
        up, loss = self._up[source], way.link.loss
        swallowed = 0 < way.link.swallows_from <= size / segments
        full = swallowed or not way.queue.admits(size, now) or (up is not None and not up.admits(size, now))
        if full or (loss and self._draw() < 1 - (1 - loss) ** segments):
            way.traffic.dropped += 1
            return None
        way.traffic.bytes += size
        way.traffic.packets += 1
        left = way.queue.leave(size, now if up is None else up.leave(size, now))
        # Packets stay in order when the latency shrinks.
        way.last_arrival = max(way.last_arrival, left + way.link.latency)
        return way.last_arrival

    def receive(self, destination: int, size: int, now: float) -> float | None:
        """Returns when a packet has passed the destination's downlink, to which it comes at ``now``; None: it is dropped."""
        down = self._down[destination]
        if down is None:
            return now
        return down.leave(size, now) if down.admits(size, now) else None

    def traffic(self) -> dict[tuple[int, int], Traffic]:
        return {pair: way.traffic for pair, way in self._ways.items()}


def _limit(rate: float | None) -> Queue | None:
    return None if rate is None else Queue(rate, usual_queue_bytes(0, rate))

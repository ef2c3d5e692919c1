"""When a packet arrives: queues, rates, delays and losses in virtual time. No clock, no I/O; seconds and bytes throughout.

A packet from ``source`` to ``destination`` passes the source's way up (where it has a limit), the link between the two, its
latency, and the destination's way down. Each of the three is a queue served at its rate, and full queues drop (drop-tail).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

LEAST_QUEUE_BYTES = 64 << 10
"""Room for the largest packet that senders make, however slow the link; more would be seconds of waiting on a slow one."""
QUEUE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a pair: latency in seconds one way, rate in bytes of IP packets per second (0: nothing passes), the
    most bytes that wait for it, and the share of packets that is lost. Raises ValueError where a number is impossible."""

    latency: float
    rate: float
    queue_bytes: int
    loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency", "rate", "queue_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be a finite number, 0 or above")
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss is {self.loss}; it must be from 0 to 1")


def usual_queue_bytes(latency: float, rate: float) -> int:
    """A round trip's worth of bytes and a tenth of a second more, so that one TCP connection can fill the link."""
    return max(LEAST_QUEUE_BYTES, math.ceil(rate * (2 * latency + QUEUE_SECONDS)))


@dataclass(slots=True)
class Queue:
    """A line served at ``rate`` bytes per second; ``free_at`` is when all that it has accepted will have left."""

    rate: float
    bound: int
    free_at: float = -math.inf

    def admits(self, size: int, now: float) -> bool:
        """Whether a packet of ``size`` finds room. An empty line takes any."""
        waiting = (self.free_at - now) * self.rate
        return self.rate > 0 and (waiting <= 0 or waiting + size <= self.bound)

    def leave(self, size: int, now: float) -> float:
        """Accepts a packet that comes at ``now``; when its last byte will have left."""
        self.free_at = max(self.free_at, now) + size / self.rate
        return self.free_at


@dataclass(slots=True)
class Traffic:
    """What has been sent over one link since the start: bytes and packets let through, packets dropped or lost."""

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
    """The state of all links of a network. ``up`` and ``down`` are bytes per second by node, None without a limit."""

    def __init__(
        self,
        links: dict[tuple[int, int], Link],
        up: list[float | None],
        down: list[float | None],
        draw: Callable[[], float],
    ) -> None:
        """``draw`` gives numbers from 0 to below 1, for losses."""
        self._ways = {pair: _Way(link, Queue(link.rate, link.queue_bytes)) for pair, link in links.items()}
        self._up = [_limit(rate) for rate in up]
        self._down = [_limit(rate) for rate in down]
        self._draw = draw

    def set_link(self, source: int, destination: int, link: Link) -> None:
        """From now on. What has been accepted arrives as it would have."""
        way = self._ways[source, destination]
        way.link = link
        way.queue.rate, way.queue.bound = link.rate, link.queue_bytes

    def send(self, source: int, destination: int, size: int, segments: int, now: float) -> float | None:
        """When a packet of ``segments`` segments gets to the destination's way down; None: it is dropped.

        One lost segment takes the packet with it, so that a connection sees as many losses as with single segments,
        though longer ones.
        """
        way = self._ways.get((source, destination))
        if way is None:
            return None
        up, loss = self._up[source], way.link.loss
        full = not way.queue.admits(size, now) or (up is not None and not up.admits(size, now))
        if full or (loss and self._draw() < 1 - (1 - loss) ** segments):
            way.traffic.dropped += 1
            return None
        way.traffic.bytes += size
        way.traffic.packets += 1
        left = way.queue.leave(size, now if up is None else up.leave(size, now))
        # A latency that shrinks reorders nothing.
        way.last_arrival = max(way.last_arrival, left + way.link.latency)
        return way.last_arrival

    def receive(self, destination: int, size: int, now: float) -> float | None:
        """When a packet that gets to the destination's way down at ``now`` is through it; None: it is dropped there."""
        down = self._down[destination]
        if down is None:
            return now
        return down.leave(size, now) if down.admits(size, now) else None

    def traffic(self) -> dict[tuple[int, int], Traffic]:
        return {pair: way.traffic for pair, way in self._ways.items()}


def _limit(rate: float | None) -> Queue | None:
    return None if rate is None else Queue(rate, usual_queue_bytes(0, rate))

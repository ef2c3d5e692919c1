"""A bandwidth probe: bytes sent over a link whose arrivals show how fast the link is.

TCP starts slowly and sends more in each round trip. So a far and fast link is full only after about ten round trips. A probe
goes on until a window of time brings at most as much as the window before. The receiver answers each piece on arrival. The
sender keeps at most as many bytes in flight as the link has shown that it can carry: bytes left in buffers when a probe is
cancelled delay the next probe.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

MOST_BYTES = 64 << 20
"""Bytes in a probe. A link of 1 Gbit/s and a round trip of 100 ms is full after half of them."""

LEAST_PIECE, MOST_PIECE = 8 << 10, 256 << 10
FINENESS = 16
"""Within these bounds, a piece is 1/FINENESS of the bytes sent before: slow links show many arrivals, fast ones cost little."""

FIRST_IN_FLIGHT = 64 << 10
"""Bytes that may be in flight before anything is known about a link."""
IN_FLIGHT_ROUND_TRIPS = 3
"""Added to FIRST_IN_FLIGHT: the bytes answered within this many round trips. Each round trip carries nearly twice as much as
the last."""

WINDOW_ROUND_TRIPS = 2
LEAST_WINDOW_SECONDS = 0.1
"""The length of a window. While TCP starts, arrivals come in one bunch per round trip."""

PLENTY_ROUND_TRIPS, PLENTY_BYTES = 40, 8 << 20
"""After both of these a probe ends in any case: TCP has long started, and on a link this fast the devices are the limit."""

LEAST_ARRIVALS = 4
"""The least arrivals per window on average. With fewer, windows are longer."""

GROWTH, DECLINE = 1.2, 0.8
"""Two windows count as equal if the second is within these multiples of the first."""
RECOVERY_WINDOWS = 2
"""Windows after a packet loss before the rate is read, so that both windows compared lie after it."""


class ProbeSender:
    """The sending side of a probe."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._sent = self.arrived = 0  # bytes
        self._in_flight: deque[tuple[float, int]] = deque()  # time sent, size
        self._answers = Arrivals()
        self._shortest_trip = float("inf")
        self._most_in_flight = FIRST_IN_FLIGHT
        self._room = asyncio.Event()
        self._ended = False

    async def pieces(self) -> AsyncIterator[bytes]:
        """The pieces to send. Ends when all are answered: grpc reports an error if an answer arrives as the call ends."""
        longest = bytes(MOST_PIECE)
        while self._sent < MOST_BYTES and not self._ended:
            most = min(MOST_PIECE, self._most_in_flight // LEAST_ARRIVALS, MOST_BYTES - self._sent)
            piece = min(max(LEAST_PIECE, self._sent // FINENESS), most)
            if self._sent - self.arrived + piece > self._most_in_flight:
                self._room.clear()
                await self._room.wait()
                continue
            self._sent += piece
            self._in_flight.append((self._clock(), piece))
            yield longest[:piece]
        while self.arrived < self._sent and not self._ended:
            self._room.clear()
            await self._room.wait()

    def answered(self, answer: bytes) -> int:
        """The receiver's answer to the next piece: its size, in ASCII decimal. Returns the size. Raises ValueError if it is
        wrong."""
        sent, piece = self._in_flight.popleft() if self._in_flight else (0.0, 0)
        if answer != str(piece).encode():
            raise ValueError(f"the answer to a piece of {piece} bytes is {answer[:20]!r}")
        now = self._clock()
        self.arrived += piece
        self._answers.add(now, piece)
        self._shortest_trip = min(self._shortest_trip, now - sent)
        lately = self.arrived - self._answers.until(now - IN_FLIGHT_ROUND_TRIPS * self._shortest_trip)
        self._most_in_flight = max(self._most_in_flight, FIRST_IN_FLIGHT + int(lately))
        self._room.set()
        return piece

    def end(self) -> None:
        """Stops sending: nobody will answer."""
        self._ended = True
        self._room.set()


async def send_probe(call: Callable[[AsyncIterator[bytes]], Any]) -> AsyncGenerator[int, None]:
    """Sends a probe of MOST_BYTES with ``call`` (``Upload``) and yields the size of each piece when it has arrived.

    Raises ValueError for a wrong answer, or if the receiver ends the probe.
    """
    probe = ProbeSender()
    running = call(probe.pieces())
    try:
        async for answer in running:
            yield probe.answered(answer)
        _check_whole(probe.arrived)
    finally:
        running.cancel()
        probe.end()  # an iterator given to grpc outlives its call


async def receive_probe(call: Callable[[AsyncIterator[bytes]], Any]) -> AsyncGenerator[int, None]:
    """Has a probe of MOST_BYTES sent with ``call`` (``Download``) and yields the size of each piece on arrival.

    Raises ValueError for an impossible piece, or if the sender ends the probe.
    """
    answers: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def answering() -> AsyncIterator[bytes]:
        while (answer := await answers.get()) is not None:
            yield answer

    running = call(answering())
    came = count = 0
    try:
        async for piece in running:
            came, count = came + len(piece), count + 1
            if not piece or came > MOST_BYTES or count > MOST_BYTES // LEAST_PIECE:
                raise ValueError(f"piece {count} of the probe has {len(piece)} bytes, {came} in all")
            answers.put_nowait(str(len(piece)).encode())
            yield len(piece)
        _check_whole(came)
    finally:
        running.cancel()
        answers.put_nowait(None)


def _check_whole(came: int) -> None:
    if came < MOST_BYTES:
        raise ValueError(f"the peer ended the probe after {came} of {MOST_BYTES} bytes")


@dataclass(slots=True)
class Arrivals:
    """The arrivals of a probe: ``totals`` bytes by ``times`` (seconds, ascending)."""

    times: list[float] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)

    def add(self, now: float, size: int) -> None:
        self.totals.append((self.totals[-1] if self.totals else 0) + size)
        self.times.append(now)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.times[-1] - self.times[0] if self.times else 0.0

    def until(self, when: float) -> float:
        """Bytes that had arrived by then. A piece in flight counts in part, except the first, whose start is unknown."""
        after = bisect_left(self.times, when)
        if after == 0:
            return 0.0
        if after == len(self.times):
            return float(self.totals[-1])
        before, span = after - 1, self.times[after] - self.times[after - 1]
        return self.totals[before] + (when - self.times[before]) / span * (self.totals[after] - self.totals[before])

    def rate(self, begin: float, end: float) -> float:
        """Bytes per second between two times."""
        return (self.until(end) - self.until(begin)) / max(end - begin, 1e-6)


def window_seconds(round_trip: float) -> float:
    """The length of a window on a link with this round trip in seconds."""
    return max(LEAST_WINDOW_SECONDS, WINDOW_ROUND_TRIPS * round_trip)


def steady_rate(arrivals: Arrivals, window: float) -> float | None:
    """Bytes per second in the last ``window`` seconds if the window before had as many; None while the two differ.

    If less came than in an earlier window, a packet was lost. TCP then delivers nothing until it has sent the packet again.
    Then it delivers everything together, mostly in one window, and starts slowly again. So after RECOVERY_WINDOWS more windows,
    when growth has ended, the rate is the higher of two: the rate since the loss, and the rate of the slower of the last two
    windows.
    """
    if arrivals.seconds < 2 * window:
        return None
    window = max(window, LEAST_ARRIVALS * arrivals.seconds / (len(arrivals.times) - 1))
    first, end, peak = arrivals.times[0], arrivals.times[-1], 0.0
    earlier, later = arrivals.rate(end - 2 * window, end - window), arrivals.rate(end - window, end)
    heard_earlier = bisect_left(arrivals.times, end - window) > bisect_left(arrivals.times, end - 2 * window)
    if arrivals.seconds < 2 * window or later > GROWTH * earlier or not heard_earlier:
        return None
    for half in range(2, int(2 * arrivals.seconds / window) + 1):
        when = first + half * window / 2
        level = arrivals.rate(when - window, when)
        if level < DECLINE * peak:
            recovered = end - when >= RECOVERY_WINDOWS * window
            return max(arrivals.rate(when - window, end), min(earlier, later)) if recovered else None
        peak = max(peak, level)
    return later if later >= DECLINE * earlier else None


def is_enough(arrivals: Arrivals, round_trip: float) -> bool:
    """Whether the arrivals show the bandwidth of a link with this round trip in seconds."""
    plenty = arrivals.seconds >= PLENTY_ROUND_TRIPS * round_trip and arrivals.totals[-1] >= PLENTY_BYTES
    return plenty or steady_rate(arrivals, window_seconds(round_trip)) is not None


def rate_of(arrivals: Arrivals, window: float) -> float:
    """Bytes per second: the steady rate, or, if it never became steady, the rate in the second half of the time.

    Raises ValueError if fewer than two pieces came, or all at the same time.
    """
    if arrivals.seconds == 0:
        raise ValueError(f"a probe came in {len(arrivals.times)} pieces, all at once: too little to tell a speed")
    steady = steady_rate(arrivals, window)
    last = arrivals.times[-1]
    return arrivals.rate(last - arrivals.seconds / 2, last) if steady is None else steady

"""A burst of bytes tells how fast a link is: how it is sent, and what its arrivals show.

TCP begins slowly and sends more each round trip, so that a far and fast link is full after ten of them. So a burst goes on until
what comes in a window of time is no more than what came in the window before. Each piece is answered when it has come, and no
more is under way than the link has shown to take: what is in buffers when a burst is called off would be in the next one's way.
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
"""In one burst: a link of 1 Gbit/s and a round trip of 100 ms is full after half of it."""

LEAST_PIECE, MOST_PIECE = 8 << 10, 256 << 10
FINENESS = 16
"""A piece is so small a part of what went before, within these bounds: slow links show their arrivals, fast ones cost little."""

FIRST_UNDER_WAY = 64 << 10
"""Bytes that may be under way before anything is known of a link."""
UNDER_WAY_ROUND_TRIPS = 3
"""And beyond that, what was answered in the last so many: nearly twice as much in each as in the one before it."""

WINDOW_ROUND_TRIPS = 2
LEAST_WINDOW_SECONDS = 0.1
"""Arrivals come in one bunch per round trip while TCP begins."""

PLENTY_ROUND_TRIPS, PLENTY_BYTES = 40, 8 << 20
"""After both of which a burst ends in any case: TCP has long begun, and where so much comes at once, devices are what is busy."""

LEAST_ARRIVALS = 4
"""In a window, on the average; else it is longer."""

GROWTH, DECLINE = 1.2, 0.8
"""A window is like the one before it where it has no more than so many times as much, and no less."""
RECOVERY_WINDOWS = 2
"""The two that are compared, so that they begin after the loss."""


class Burst:
    """The sending side of a burst of ``size`` bytes."""

    def __init__(self, size: int = MOST_BYTES, clock: Callable[[], float] = time.perf_counter) -> None:
        self._size = size
        self._clock = clock
        self._sent = self._answered = 0
        self._under_way: deque[tuple[float, int]] = deque()  # when it was sent, and its size
        self._answers = Arrivals()
        self._shortest_trip = float("inf")
        self._most_under_way = FIRST_UNDER_WAY
        self._room = asyncio.Event()
        self._ended = False

    async def pieces(self) -> AsyncIterator[bytes]:
        """Ends when all are answered: where a call's end met an answer, grpc would report an error of its own."""
        longest = bytes(MOST_PIECE)
        while self._sent < self._size and not self._ended:
            most = min(MOST_PIECE, self._most_under_way // LEAST_ARRIVALS, self._size - self._sent)
            piece = min(max(LEAST_PIECE, self._sent // FINENESS), most)
            if self._sent - self._answered + piece > self._most_under_way:
                self._room.clear()
                await self._room.wait()
                continue
            self._sent += piece
            self._under_way.append((self._clock(), piece))
            yield longest[:piece]
        while self._answered < self._sent and not self._ended:
            self._room.clear()
            await self._room.wait()

    def answered(self, answer: bytes) -> int:
        """The receiver has got the next piece, and says its size (ASCII decimal), which is returned. Raises ValueError where it
        was another one."""
        sent, piece = self._under_way.popleft() if self._under_way else (0.0, 0)
        if answer != str(piece).encode():
            raise ValueError(f"{answer[:20]!r} is answered to a piece of {piece} bytes")
        now = self._clock()
        self._answered += piece
        self._answers.add(now, piece)
        self._shortest_trip = min(self._shortest_trip, now - sent)
        lately = self._answered - self._answers.until(now - UNDER_WAY_ROUND_TRIPS * self._shortest_trip)
        self._most_under_way = max(self._most_under_way, FIRST_UNDER_WAY + int(lately))
        self._room.set()
        return piece

    def end(self) -> None:
        """No more is sent: nobody will answer."""
        self._ended = True
        self._room.set()


async def send_burst(call: Callable[[AsyncIterator[bytes]], Any], size: int) -> AsyncGenerator[int, None]:
    """Sends a burst with ``call`` (see streams.upload_call); the size of each piece when it has come. Raises ValueError for an
    answer that does not fit, or where the receiver ends it."""
    burst = Burst(size)
    running = call(burst.pieces())
    came = 0
    try:
        async for answer in running:
            came += (piece := burst.answered(answer))
            yield piece
        _check_whole(came, size)
    finally:
        running.cancel()
        burst.end()  # an iterator given to grpc outlives its call


async def receive_burst(call: Callable[[AsyncIterator[bytes]], Any]) -> AsyncGenerator[int, None]:
    """Has a burst of MOST_BYTES sent with ``call`` (see streams.download_call); the size of each piece when it comes. Raises
    ValueError for pieces that are none, or where the sender ends it."""
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
                raise ValueError(f"piece {count} of the burst has {len(piece)} bytes, {came} in all")
            answers.put_nowait(str(len(piece)).encode())
            yield len(piece)
        _check_whole(came, MOST_BYTES)
    finally:
        running.cancel()
        answers.put_nowait(None)


def _check_whole(came: int, size: int) -> None:
    if came < size:
        raise ValueError(f"the peer ended the burst after {came} of {size} bytes")


@dataclass(slots=True)
class Arrivals:
    """What has come of a burst: at ``times`` (seconds, ascending), ``totals`` bytes."""

    times: list[float] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)

    def add(self, now: float, size: int) -> None:
        self.totals.append((self.totals[-1] if self.totals else 0) + size)
        self.times.append(now)

    @property
    def seconds(self) -> float:
        """From the first to the last."""
        return self.times[-1] - self.times[0] if self.times else 0.0

    def until(self, when: float) -> float:
        """Bytes; a piece that was under way then counts in part, but for the first, of which it is not known since when."""
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
    """How long one window is, on a link of this round trip in seconds."""
    return max(LEAST_WINDOW_SECONDS, WINDOW_ROUND_TRIPS * round_trip)


def steady_rate(arrivals: Arrivals, window: float) -> float | None:
    """Bytes per second in the last window of so many seconds, where that is like the one before; None while it is not.

    Where less came than in an earlier window, a packet was lost: nothing is handed over until that is there again, and then all
    at once, most of it in one window; and TCP begins slowly again. So what counts, once RECOVERY_WINDOWS more have passed and it
    grows no more, is all that came from then on, or the slower of the last two windows where that is more.
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
    """Whether what has come of a burst tells the bandwidth of a link of this round trip in seconds."""
    plenty = arrivals.seconds >= PLENTY_ROUND_TRIPS * round_trip and arrivals.totals[-1] >= PLENTY_BYTES
    return plenty or steady_rate(arrivals, window_seconds(round_trip)) is not None


def rate_of(arrivals: Arrivals, window: float) -> float:
    """Bytes per second: steady_rate's, and where it never became steady, that of the latter half of the time. Raises ValueError
    where fewer than two pieces came, or all at once."""
    if arrivals.seconds == 0:
        raise ValueError(f"a burst came in {len(arrivals.times)} pieces, all at once: how quickly cannot be told")
    steady = steady_rate(arrivals, window)
    last = arrivals.times[-1]
    return arrivals.rate(last - arrivals.seconds / 2, last) if steady is None else steady

"""A probe goes on until its link is full, with no more in flight than that takes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from dtfm.node.network.bandwidth_probe import (
    FIRST_IN_FLIGHT,
    IN_FLIGHT_ROUND_TRIPS,
    LEAST_PIECE,
    MOST_BYTES,
    MOST_PIECE,
    Arrivals,
    ProbeSender,
    is_enough,
    rate_of,
    steady_rate,
    window_seconds,
)

FIRST_FLIGHT = 14_600
"""What TCP sends in its first round trip."""


def slow_start(rate: float, round_trip: float, growth: float) -> Iterator[tuple[float, int]]:
    """An endless probe's arrivals (time, size): in each round trip ``growth`` times as much as in the one before, at ``rate``
    bytes per second, until the link is full."""
    flight, sent, began = float(FIRST_FLIGHT), 0, 0.0
    while True:
        left = int(flight)
        now = began
        while left > 0:
            piece = min(max(LEAST_PIECE, sent // 16), MOST_PIECE)
            now += piece / rate
            sent, left = sent + piece, left - piece
            yield now, piece
        began = max(began + round_trip, now)
        flight = min(flight * growth, rate * round_trip + FIRST_FLIGHT)


def received(probe: Iterator[tuple[float, int]], round_trip: float) -> Arrivals:
    """The arrivals until they were enough."""
    arrivals = Arrivals()
    for now, size in probe:
        arrivals.add(now, size)
        if is_enough(arrivals, round_trip):
            return arrivals
    raise AssertionError("it ended")


@given(
    rate=st.floats(2e4, 1.2e9),
    round_trip=st.floats(0.0001, 0.4),
    growth=st.floats(1.5, 2.0),
)
def test_a_probe_goes_on_until_its_link_is_full(rate: float, round_trip: float, growth: float) -> None:
    arrivals = received(slow_start(rate, round_trip, growth), round_trip)
    assert rate_of(arrivals, window_seconds(round_trip)) == pytest.approx(rate, rel=0.25)


def test_a_bunch_that_a_lost_packet_held_up_does_not_count_as_speed() -> None:
    rate, piece = 1e5, 2_000
    growing = [(0.1, piece), (0.3, piece), (0.5, piece), (0.6, piece), (0.7, piece), (0.75, piece)]
    full = [(0.75 + piece / rate * number, piece) for number in range(1, 500)]
    lost, there_again = 1.1, 1.7
    came = [*growing, *((there_again if lost < now < there_again else now, size) for now, size in full)]
    arrivals = received(iter(came), 0.2)
    assert arrivals.times[-1] > there_again
    assert rate_of(arrivals, 0.4) == pytest.approx(rate, rel=0.1)


def test_the_slow_start_after_a_lost_packet_does_not_count_once_the_link_is_full_again() -> None:
    as_seen_of_bbr = "1 2 2 4 6 14 25 10 2 32 49 49 77 96 96 96 96 96 96"  # Mbit/s in 0.2 s each
    arrivals, round_trip, slot, pieces = Arrivals(), 0.2, 0.2, 10
    for number, rate in enumerate(map(int, as_seen_of_bbr.split())):
        for piece in range(pieces):
            arrivals.add((number + piece / pieces) * slot, round(rate * 1e6 / 8 * slot / pieces))
        if is_enough(arrivals, round_trip):
            break
    assert rate_of(arrivals, window_seconds(round_trip)) == pytest.approx(96e6 / 8, rel=0.1)


def test_the_first_piece_after_a_long_silence_does_not_end_a_probe() -> None:
    rate, piece, window = 12.5e6, 125_000, window_seconds(0.02)
    growing = [(0.01 * number, int(piece * 2 ** (0.1 * number - 3))) for number in range(25)]
    again = growing[-1][0] + 5 * window
    arrivals = received(iter([*growing, *((again + 0.01 * number, piece) for number in range(100))]), 0.02)
    assert arrivals.times[-1] > again
    assert rate_of(arrivals, window) == pytest.approx(rate, rel=0.1)


def test_a_probe_that_never_becomes_steady_counts_by_the_second_half_of_its_time() -> None:
    arrivals = Arrivals()
    for now, size in ((0.0, 1), (1.0, 10), (2.0, 20), (3.0, 40), (4.0, 80)):
        arrivals.add(now, size)
    assert steady_rate(arrivals, 2.0) is None
    assert rate_of(arrivals, 2.0) == pytest.approx((40 + 80) / 2)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_speed_takes_two_pieces_at_different_times(count: int) -> None:
    arrivals = Arrivals()
    for _ in range(count):
        arrivals.add(1.0, 8)
    with pytest.raises(ValueError, match=f"in {count} pieces"):
        rate_of(arrivals, 0.1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("rate", "trip"), [(2e5, 0.1), (1e7, 0.2), (1e8, 0.01)])
async def test_at_most_a_few_round_trips_of_what_the_link_carries_are_in_flight(rate: float, trip: float) -> None:
    clock = Clock()
    probe = ProbeSender(clock)
    in_flight: deque[tuple[float, int]] = deque()  # when its answer comes
    free_at, most = 0.0, 0

    async def send() -> None:
        nonlocal free_at, most
        async for piece in probe.pieces():
            free_at = max(free_at, clock.now) + len(piece) / rate
            in_flight.append((free_at + trip, len(piece)))
            most = max(most, sum(size for _, size in in_flight))

    sending = asyncio.create_task(send())
    while not sending.done():
        await asyncio.sleep(0)  # it sends what it may
        if in_flight:
            clock.now, size = in_flight.popleft()
            assert probe.answered(str(size).encode()) == size
    link_holds = rate * trip
    assert (
        min(link_holds, MOST_BYTES / 4) <= most <= FIRST_IN_FLIGHT + IN_FLIGHT_ROUND_TRIPS * link_holds + 4 * MOST_PIECE
    )


@pytest.mark.parametrize("answer", [b"", b"8191", b"-8192", b"8192.0", b"\xff" * 50])
async def test_an_answer_to_another_piece_is_refused(answer: bytes) -> None:
    probe = ProbeSender()
    with pytest.raises(ValueError, match="to a piece of 0 bytes"):
        probe.answered(b"8192")  # before anything was sent
    assert len(await anext(probe.pieces())) == LEAST_PIECE
    with pytest.raises(ValueError, match=f"to a piece of {LEAST_PIECE} bytes"):
        probe.answered(answer)


async def test_a_probe_without_answers_ends() -> None:
    probe = ProbeSender()

    async def send() -> int:
        return sum([len(piece) async for piece in probe.pieces()])

    sending = asyncio.create_task(send())
    await asyncio.sleep(0)
    probe.end()
    assert await asyncio.wait_for(sending, 10) <= FIRST_IN_FLIGHT

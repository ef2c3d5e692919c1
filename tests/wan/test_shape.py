"""Queues, rates, delays and losses in virtual time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from tests.wan.shape import Link, Shape, usual_queue_bytes

RATE = 1e6
FREE = [None, None, None]

packets = st.lists(st.tuples(st.floats(0, 0.1), st.integers(20, 64_000)), min_size=1, max_size=60)
"""The pause before each packet in seconds, and its size in bytes."""


def shape(
    link: Link,
    *,
    up: list[float | None] | None = None,
    down: list[float | None] | None = None,
    seed: int = 0,
) -> Shape:
    """Three nodes, with the same link between any two."""
    links = {(i, j): link for i in range(3) for j in range(3) if i != j}
    return Shape(links, up or [*FREE], down or [*FREE], random.Random(seed).random)


def test_a_single_packet_takes_its_size_over_the_rate_plus_the_latency() -> None:
    assert shape(Link(0.02, RATE, 10**6)).send(0, 1, 1000, 1, now=5.0) == pytest.approx(5.021)


def test_packets_wait_for_earlier_ones_of_the_same_pair_only() -> None:
    net = shape(Link(0.02, RATE, 10**6))
    arrivals = [net.send(0, 1, 1000, 1, now=0.0) for _ in range(3)]
    assert arrivals == pytest.approx([0.021, 0.022, 0.023])
    assert net.send(1, 0, 1000, 1, now=0.0) == pytest.approx(0.021)
    assert net.send(0, 2, 1000, 1, now=0.0) == pytest.approx(0.021)


@given(packets, st.integers(0, 200_000))
def test_the_rate_limits_what_passes_and_the_queue_limits_what_waits(sent: list[tuple[float, int]], bound: int) -> None:
    net, now, through, first = shape(Link(0.01, RATE, bound)), 0.0, 0, None
    for pause, size in sent:
        now += pause
        due = net.send(0, 1, size, 1, now)
        if due is None:
            continue
        first = now if first is None else first
        through += size
        left = due - 0.01
        assert through <= RATE * (left - first) * (1 + 1e-9) + 1e-6
        assert RATE * (left - now) <= max(bound, size) * (1 + 1e-9) + 1e-6
    seen = net.traffic()[0, 1]
    assert (seen.bytes, seen.packets + seen.dropped) == (through, len(sent))


def test_a_full_queue_drops_and_takes_packets_again_when_it_has_drained() -> None:
    net = shape(Link(0.0, RATE, 2500))
    assert [net.send(0, 1, 1000, 1, now=0.0) is None for _ in range(4)] == [False, False, True, True]
    assert net.send(0, 1, 1000, 1, now=0.0015) is not None


def test_an_empty_queue_takes_a_packet_larger_than_itself() -> None:
    assert shape(Link(0.0, RATE, 100)).send(0, 1, 64_000, 44, now=0.0) == pytest.approx(0.064)


@given(packets, st.lists(st.floats(0, 0.5), min_size=60, max_size=60))
def test_packets_of_a_pair_arrive_in_order_while_the_latency_changes(
    sent: list[tuple[float, int]], latencies: list[float]
) -> None:
    net, now, last = shape(Link(0.1, RATE, 10**6)), 0.0, 0.0
    for (pause, size), latency in zip(sent, latencies, strict=False):
        now += pause
        net.set_link(0, 1, Link(latency, RATE, 10**6))
        due = net.send(0, 1, size, 1, now)
        if due is not None:
            assert due >= last
            last = due


def test_all_destinations_share_the_uplink() -> None:
    net = shape(Link(0.0, 10 * RATE, 10**6), up=[RATE, None, None])
    assert net.send(0, 1, 10_000, 7, now=0.0) == pytest.approx(0.011)
    assert net.send(0, 2, 10_000, 7, now=0.0) == pytest.approx(0.021)
    assert net.send(1, 2, 10_000, 7, now=0.0) == pytest.approx(0.001)


def test_all_sources_share_the_downlink_in_order_of_arrival() -> None:
    net = shape(Link(0.0, RATE, 10**6), down=[None, None, RATE])
    assert net.receive(2, 10_000, now=1.0) == pytest.approx(1.01)
    assert net.receive(2, 10_000, now=1.0) == pytest.approx(1.02)
    assert net.receive(1, 10_000, now=1.0) == 1.0


def test_a_full_downlink_drops_packets() -> None:
    net = shape(Link(0.0, RATE, 10**6), down=[None, RATE, None])
    room = usual_queue_bytes(0.0, RATE)
    outcomes = [net.receive(1, 64_000, now=0.0) for _ in range(room // 64_000 + 1)]
    assert outcomes[-1] is None
    assert None not in outcomes[:-1]


@pytest.mark.parametrize(("segments", "share"), [(1, 0.1), (10, 1 - 0.9**10)])
def test_a_packet_is_lost_if_any_of_its_segments_is(segments: int, share: float) -> None:
    net = shape(Link(0.0, 1e9, 10**9, loss=0.1))
    lost = sum(net.send(0, 1, 1000, segments, now=float(n)) is None for n in range(5000))
    assert lost / 5000 == pytest.approx(share, abs=0.03)
    assert net.traffic()[0, 1].dropped == lost


def test_nothing_passes_a_link_without_rate_nor_one_that_does_not_exist() -> None:
    net = shape(Link(0.0, 0.0, 10**6))
    assert net.send(0, 1, 100, 1, now=0.0) is None
    assert net.send(0, 0, 100, 1, now=0.0) is None


@pytest.mark.parametrize(
    ("field", "value"), [("latency", -1.0), ("rate", float("nan")), ("queue_bytes", -1), ("loss", 1.5)]
)
def test_impossible_numbers_are_named(field: str, value: float) -> None:
    fields = {"latency": 0.0, "rate": 1.0, "queue_bytes": 1, "loss": 0.0, field: value}
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        Link(**fields)  # type: ignore[arg-type]

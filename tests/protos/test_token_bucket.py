"""Rates and bursts: `protos/token_bucket.py`."""

from __future__ import annotations

from dtfm.protos.token_bucket import TokenBucket


def test_so_many_at_once_and_then_at_the_rate() -> None:
    bucket = TokenBucket(rate=2, most=3)
    assert [bucket.take(10) for _ in range(4)] == [True, True, True, False]
    assert [bucket.take(10.5), bucket.take(10.5)] == [True, False]


def test_a_long_rest_fills_it_no_further_than_to_the_brim() -> None:
    bucket = TokenBucket(rate=2, most=3)
    bucket.take(0, 3)
    assert not bucket.is_full(1)
    assert bucket.is_full(1000)
    assert [bucket.take(1000) for _ in range(4)] == [True, True, True, False]


def test_who_draws_is_told_how_long_to_wait() -> None:
    bucket = TokenBucket(rate=2, most=3)
    assert [bucket.draw(0, 3), bucket.draw(0, 1), bucket.draw(0, 1)] == [0.0, 0.5, 1.0]
    assert bucket.draw(1, 0) == 0.0

"""What happens often is logged once, and then counted: `service/repeated.py`."""

from __future__ import annotations

from dtfm.coordinator.service.repeated import SECONDS, Repeated


def test_the_first_of_a_kind_is_new_and_the_others_are_counted_until_its_minute_is_over() -> None:
    repeated = Repeated[str]()
    assert [repeated.is_new(kind, now) for now, kind in enumerate("aaba")] == [True, False, True, False]
    assert repeated.ended(SECONDS - 1) == []
    assert repeated.ended(SECONDS) == [("a", 2)]
    assert repeated.is_new("a", SECONDS)
    assert not repeated.is_new("b", SECONDS)


def test_what_happened_once_is_not_counted() -> None:
    repeated = Repeated[str]()
    repeated.is_new("a", 0.0)
    assert repeated.ended(SECONDS) == []
    assert repeated.is_new("a", SECONDS)

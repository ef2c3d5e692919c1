"""How many connections strangers may have: `service/strangers.py`."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.service.strangers import Limits, Strangers

LIMITS = Limits(open_of_one=2, rate_of_one=1, burst_of_one=4, open=5, rate=1, burst=10)


def test_one_origin_has_few_at_a_time_and_others_are_not_hurt() -> None:
    strangers = Strangers(LIMITS)
    assert [strangers.come("a", 0) for _ in range(3)] == [True, True, False]
    assert strangers.come("b", 0)
    strangers.go("a")
    assert strangers.come("a", 0)


def test_all_together_have_a_bound_too() -> None:
    strangers = Strangers(LIMITS)
    assert [strangers.come(str(origin), 0) for origin in range(6)] == [True] * 5 + [False]


def test_one_origin_comes_no_faster_than_its_rate() -> None:
    strangers = Strangers(LIMITS)
    taken = 0
    for _ in range(10):
        if strangers.come("a", 0):
            strangers.go("a")
            taken += 1
    assert taken == 4
    assert [strangers.come("a", 1), strangers.come("a", 1)] == [True, False]


def test_many_origins_that_come_fast_do_not_keep_out_where_a_member_is() -> None:
    strangers = Strangers(LIMITS)
    strangers.come("rack", 0)
    strangers.let_in("rack", "a key", 0)
    for origin in range(20):
        if strangers.come(str(origin), 0):
            strangers.go(str(origin))
    assert not strangers.come("another", 0)
    assert strangers.come("rack", 0)


def test_a_member_that_connects_again_and_again_comes_no_faster_than_a_stranger() -> None:
    strangers = Strangers(replace(LIMITS, rate_of_key=0.5, burst_of_key=3))
    taken = 0
    for _ in range(50):
        if strangers.come("a", 0):
            strangers.let_in("a", "a key", 0)
            taken += 1
    assert taken == 3 + 4
    assert not strangers.come("a", 0)
    strangers.come("elsewhere", 0)
    strangers.let_in("elsewhere", "a key", 0)
    assert "elsewhere" not in strangers._members, "nor does it open other addresses"
    strangers.come("a", 2)
    strangers.let_in("a", "another key", 2)
    assert list(strangers._keys) == ["a key", "another key"]


def test_nothing_is_remembered_of_those_that_are_gone() -> None:
    strangers = Strangers(LIMITS)
    for second in range(1000):
        if strangers.come(str(second), second):
            strangers.go(str(second))
    assert len(strangers._each) < 5
    assert not strangers._open


def test_a_process_that_may_open_few_files_keeps_most_of_them_for_members() -> None:
    assert Limits.within(1 << 20) == Limits()
    few = Limits.within(1024)
    assert (few.open, few.open_of_one, few.members) == (128, 128, 170)
    assert 3 * (few.open + few.members) < 1024  # each takes up to three files

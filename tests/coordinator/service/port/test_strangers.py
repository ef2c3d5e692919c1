"""How many connections strangers may have: `service/port/strangers.py`."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

from hypothesis import given, strategies as st

from dtfm.coordinator.service.port.strangers import Limits, Strangers

LIMITS = Limits(open_of_one=2, rate_of_one=1, burst_of_one=4, open=5, rate=1, burst=10)


Door = Strangers[int]
NUMBERS = itertools.count()


def come(strangers: Door, origin: str, now: float = 0) -> int | None:
    """The number of a connection from there; None: it is refused."""
    who = next(NUMBERS)
    return None if strangers.come(who, origin, now) is None else who


def came(strangers: Door, origin: str, now: float = 0) -> int:
    who = come(strangers, origin, now)
    assert who is not None
    return who


def become_member(strangers: Door, origin: str, key: str = "a key", now: float = 0) -> bool:
    """Whether the connection was taken, that then shows a member's key."""
    if (who := come(strangers, origin, now)) is not None:
        strangers.let_in(who, origin, key, now)
    return who is not None


def come_and_go(strangers: Door, origin: str, now: float = 0) -> bool:
    if (who := come(strangers, origin, now)) is not None:
        strangers.go(who)
    return who is not None


def test_one_origin_has_few_at_a_time_and_others_are_not_hurt() -> None:
    strangers = Door(LIMITS)
    first, second, third = (come(strangers, "a") for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is None
    assert come(strangers, "b") is not None
    strangers.go(first)
    assert come(strangers, "a") is not None


def test_when_all_have_too_many_the_oldest_of_the_origin_with_most_makes_room_for_one_with_fewer() -> None:
    strangers = Door(LIMITS)
    oldest = came(strangers, "a")
    for origin in ("a", "b", "b", "c"):
        came(strangers, origin)
    assert strangers.come(-1, "d", 0) == [oldest]
    assert come(strangers, "b") is None, "its own has as many as any"
    strangers.go(oldest)  # this connection was no longer counted
    assert strangers.open == LIMITS.open


def test_strangers_whose_connections_stay_open_do_not_keep_out_where_a_member_is() -> None:
    strangers = Door(replace(LIMITS, burst=100), members=["home"])
    become_member(strangers, "rack")
    for origin in range(10):
        for _ in range(2):
            come(strangers, str(origin))
    assert strangers.open == LIMITS.open
    assert strangers.come(-1, "rack", 0) == []
    assert strangers.come(-2, "home", 0) == [], "a member of before the restart"


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(["come", "come", "come", "go", "let in"]))))
def test_whoever_has_fewest_is_taken_and_nobody_with_as_few_as_the_newcomer_is_cut_off(
    moves: list[tuple[str, str]],
) -> None:
    limits = Limits(open_of_one=3, open=5, burst_of_one=1e9, burst=1e9, burst_of_key=1e9)
    strangers, members = Door(limits, members="a"), {"a"}
    there: list[tuple[int, str, bool]] = []  # number, origin, and whether it came from an origin of members
    for number, (origin, move) in enumerate(moves):
        mine = [each for each in there if each[1] == origin]
        if move == "come":
            known = origin in members
            among = Counter(of for _, of, part in there if part == known)
            taken = strangers.come(number, origin, 0)
            is_full = among.total() == limits.open
            most = max(among.values(), default=0)
            assert (taken is not None) == (among[origin] < limits.open_of_one and (not is_full or among[origin] < most))
            if taken is not None:
                assert bool(taken) == is_full
                there = [each for each in there if each[0] not in taken] + [(number, origin, known)]
                now = Counter(of for _, of, part in there if part == known)
                assert [of for of in among if now[of] < among[of]] == [
                    of for of in among if is_full and now[of] == most - 1 and among[of] == most
                ][:1]
        elif mine and move == "go":
            strangers.go(mine[0][0])
            there.remove(mine[0])
        elif mine:
            strangers.let_in(mine[0][0], origin, origin, 0)
            members.add(origin)
            there.remove(mine[0])
        assert strangers.open == len(there)


def test_one_origin_comes_no_faster_than_its_rate() -> None:
    strangers = Door(LIMITS)
    assert sum(come_and_go(strangers, "a") for _ in range(10)) == 4
    assert [come(strangers, "a", 1) is not None for _ in range(2)] == [True, False]


def test_many_origins_that_come_fast_do_not_keep_out_where_a_member_is() -> None:
    strangers = Door(LIMITS)
    become_member(strangers, "rack")
    for origin in range(20):
        come_and_go(strangers, str(origin))
    assert come(strangers, "another") is None
    assert come(strangers, "rack") is not None


def test_a_member_that_connects_again_and_again_comes_no_faster_than_a_stranger() -> None:
    strangers = Door(replace(LIMITS, rate_of_key=0.5, burst_of_key=3))
    assert sum(become_member(strangers, "a") for _ in range(50)) == 3 + 4
    assert come(strangers, "a") is None
    become_member(strangers, "elsewhere")
    assert "elsewhere" not in strangers._members, "nor does it open other addresses"
    become_member(strangers, "a", "another key", 2)
    assert list(strangers._keys) == ["a key", "another key"]


def test_nothing_is_remembered_of_those_that_are_gone() -> None:
    strangers = Door(LIMITS)
    for second in range(1000):
        come_and_go(strangers, str(second), second)
    assert len(strangers._each) < 5
    assert not strangers.open
    assert not strangers._unknown._of


def test_a_process_that_may_open_few_files_keeps_most_of_them_for_members() -> None:
    assert Limits.within(1 << 20) == Limits()
    few = Limits.within(1024)
    assert (few.open, few.open_of_one, few.members) == (42, 42, 170)
    assert 3 * (2 * few.open + few.members) < 1024  # each takes up to three files

"""Against whom contradictions and failures are settled: `core/trust/verdict.py`."""

from __future__ import annotations

import operator

from hypothesis import given, strategies as st

from dtfm.coordinator.core.trust.verdict import (
    Against,
    OfTheRun,
    Unsettled,
    against_one,
    blame,
    blame_for_waiting,
    settle,
    times_suspected,
)
from dtfm.coordinator.log.events import NodeLeft
from dtfm.coordinator.log.ledger import Ledger
from tests.coordinator.core.trust.test_standing import ledger, undecided
from tests.coordinator.ledgers import altered


def views(said: str) -> dict[str, str]:
    """n0 says the first letter, n1 the second, ..."""
    return {f"n{number}": view for number, view in enumerate(said)}


def test_there_is_nothing_to_settle_where_all_say_the_same() -> None:
    assert settle(ledger("abc"), views("xxx"), operator.eq) is None
    assert settle(ledger("abc"), {}, operator.eq) is None


def test_more_than_half_of_the_parties_are_believed() -> None:
    verdict = settle(ledger("abc", (0, 0, 99)), views("xxy"), operator.eq)
    assert verdict == Against(("n2",), ("n0", "n1"))


def test_a_party_with_many_names_has_one_voice() -> None:
    """One that starts ten nodes does not outvote two others."""
    verdict = settle(ledger("aaaabc"), views("yyyyxx"), operator.eq)
    assert verdict == Against(("n0",), ("n4", "n5"))


def test_a_party_that_contradicts_itself_is_not_believed() -> None:
    assert settle(ledger("aab"), views("xyx"), operator.eq) == Against(("n0",), ("n2",), undecided=True, weighed=True)
    assert settle(ledger("aab"), {"n0": "x", "n1": "y"}, operator.eq) == Against(("n0",))


def test_one_word_against_another_is_undecided_and_the_one_of_less_standing_goes() -> None:
    assert settle(ledger("ab", (7, 3)), views("xy"), operator.eq) == Against(
        ("n1",), ("n0",), undecided=True, weighed=True
    )
    assert settle(ledger("ab", (3, 7)), views("xy"), operator.eq) == Against(
        ("n0",), ("n1",), undecided=True, weighed=True
    )


def test_who_has_outlasted_one_undecided_contradiction_does_not_outlast_the_next() -> None:
    """Or one of the best standing could have all newcomers suspended, one after the other."""
    known = ledger("ab", (500, 1), undecided("before", against="n0"))
    assert settle(known, views("xy"), operator.eq) == Against(("n0",), ("n1",), undecided=True, weighed=True)


def test_without_a_majority_the_largest_group_is_believed_for_the_time_being() -> None:
    verdict = settle(ledger("abcd", (0, 0, 9, 9)), views("xxyz"), operator.eq)
    assert verdict == Against(("n2", "n3"), ("n0", "n1"), undecided=True, weighed=True)


@given(st.lists(st.sampled_from("xyz"), min_size=1, max_size=7), st.text("abc", min_size=7, max_size=7))
def test_whoever_remains_agrees_and_somebody_remains_unless_all_contradict_themselves(
    said: list[str], keys: str
) -> None:
    known, told = ledger(keys), views("".join(said))
    verdict = settle(known, told, operator.eq)
    if verdict is None:
        assert len(set(said)) == 1
        return
    gone = {keys[int(node[1:])] for node in verdict.members} if len(set(keys)) > 1 else set()
    left = {view for node, view in told.items() if keys[int(node[1:])] not in gone and node not in verdict.members}
    assert verdict.members
    assert len(left) <= 1


def close(one: float, other: float) -> bool:
    return abs(one - other) <= 1


@given(st.lists(st.integers(0, 4), max_size=6), st.text("abc", min_size=6, max_size=6))
def test_a_verdict_is_always_against_somebody(said: list[int], keys: str) -> None:
    """Also where the first agrees with the second and the second with the third, and yet not the first with the third."""
    told = {f"n{number}": float(view) for number, view in enumerate(said)}
    verdict = settle(ledger(keys), told, close)
    assert verdict is None or verdict.members


def test_who_agrees_with_the_one_in_the_middle_agrees() -> None:
    assert settle(ledger("abc"), {"n0": 1.0, "n1": 2.0, "n2": 3.0}, close) is None
    assert settle(ledger("abc"), {"n0": 1.0, "n1": 2.0, "n2": 4.0}, close) == Against(("n2",), ("n0", "n1"))


def test_three_failures_that_one_alone_reports_are_its_own() -> None:
    known = ledger("abc")
    assert blame(known, ["n0", "n0"]) == Unsettled()
    assert blame(known, ["n0", "n0", "n0"]) == Against(("n0",))
    assert blame(known, ["n0", "n0", "n0"], also=["n1"]) == Against(("n0",))


def test_what_two_parties_have_reported_twice_is_the_runs_own_fault() -> None:
    known = ledger("abc")
    assert blame(known, ["n0", "n1", "n0"]) == Unsettled()
    assert blame(known, ["n0", "n1", "n0", "n1"]) == OfTheRun()
    assert blame(known, ["n0", "n0", "n0"], also=["n1", "n1"]) == OfTheRun()
    assert blame(known, ["n0", "n0", "n0", "n1"]) == Unsettled(), "n0 is gone by now"
    assert blame(known, ["n0", "n0", "n0", "n1", "n1"]) == OfTheRun()


def test_two_names_of_one_key_do_not_end_a_run() -> None:
    assert blame(ledger("aab"), ["n0", "n1", "n0"], also=["n1", "n1"]) == Against(("n0",))


def test_a_run_of_one_party_is_its_own_to_end() -> None:
    assert blame(ledger("aa"), ["n0", "n0", "n0"]) == OfTheRun()


def waited_for(*suspects: str) -> Ledger:
    """Of n0 to n3; one string for each attempt, a digit for each suspect."""
    return altered(ledger("abcc"), waited_for=tuple(frozenset(f"n{digit}" for digit in those) for those in suspects))


def test_what_somebody_was_waited_for_before_it_left_counts_once_it_is_waited_for_again() -> None:
    before = altered(waited_for("0"), evaded={"n0": 2, "n1": 2})
    assert blame_for_waiting(before) == Against(("n0",), undecided=True)
    assert blame_for_waiting(altered(before, evaded={"n0": 1, "n1": 2})) == Unsettled()
    names_of_one_key = altered(waited_for("2"), evaded={"n2": 1, "n3": 1})
    assert blame_for_waiting(names_of_one_key) == Against(("n2",), undecided=True)


def test_only_who_was_waited_for_each_time_is_accused() -> None:
    assert blame_for_waiting(waited_for("0", "0")) == Unsettled()
    assert blame_for_waiting(waited_for("0", "0", "0")) == Against(("n0",))
    assert blame_for_waiting(waited_for("01", "02", "0")) == Against(("n0",))
    assert blame_for_waiting(waited_for("0", "0", "1")) == Unsettled()
    assert blame_for_waiting(waited_for("0", "0", "1", "1", "1")) == Against(("n1",))
    assert blame_for_waiting(waited_for("01", "01", "012")) == Against(("n1",), ("n0",), undecided=True, weighed=True)
    assert blame_for_waiting(waited_for("", "0", "0")) == Unsettled()


def test_of_those_who_are_silent_in_turn_one_goes_who_was_suspected_most_often() -> None:
    in_turn = ("0123", "0", "1", "0", "1", "0", "1", "0", "12")
    assert blame_for_waiting(waited_for(*in_turn[1:])) == Unsettled()
    assert blame_for_waiting(waited_for(*in_turn)) == Against(("n1",), ("n0",), undecided=True, weighed=True)
    assert blame_for_waiting(waited_for(*in_turn, "0")) == Against(("n0",), undecided=True)
    assert times_suspected(waited_for(*in_turn), "n2") == 2
    assert blame_for_waiting(waited_for(*[""] * 9)) == Unsettled()


def test_who_has_left_and_comes_again_begins_anew() -> None:
    left = NodeLeft("n0", "why").apply(waited_for("0", "01"))
    assert left.trust.waited_for == (frozenset(), frozenset({"n1"}))


def test_once_somebody_is_quarantined_the_others_begin_anew() -> None:
    gone = undecided("n1", against="n0").apply(waited_for("01", "01", "01"))
    assert gone.trust.waited_for == ()


def test_who_waits_with_one_name_after_the_other_is_accused_too() -> None:
    assert blame_for_waiting(waited_for("2", "3", "2")) == Against(("n2",))


def test_of_several_suspects_the_one_of_least_standing_goes_undecided() -> None:
    known = ledger("abc", (4, 2, 9))
    assert against_one(known, {"n1"}) == Against(("n1",))
    assert against_one(known, {"n0", "n1", "n2"}) == Against(("n1",), ("n0", "n2"), undecided=True, weighed=True)

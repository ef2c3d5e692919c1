"""What honest devices are apart is learned from audits, whatever a minority says and does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings, strategies as st

from dtfm.coordinator.log import rounding
from dtfm.coordinator.log.events import WorkAudited
from dtfm.coordinator.log.rounding import LEAST_AUDITS, Rounding, learned, sort_of, typical, without

SORT = sort_of("losses", "off", ("cpu x", "cpu x"))


def audit(
    by: str, of: str, error: float, *, clean: bool = True, kinds: tuple[str, ...] = ("cpu x",) * 2
) -> WorkAudited:
    codecs = {"losses": "off"}
    return WorkAudited(1, 1, of, by, 4, clean, {"losses": error}, of, by, kinds, codecs)


def after(audits: Iterable[WorkAudited], before: Rounding | None = None) -> Rounding:
    known = before or {}
    for each in audits:
        known = learned(known, each)
    return known


def each_of_each(names: str, error: Callable[[str, str], float], times: int = 4) -> list[WorkAudited]:
    return [audit(by, of, error(by, of)) for by, of in itertools.permutations(names, 2) for _ in range(times)]


def found(known: Rounding) -> float | None:
    return typical(known.get(SORT, ()))


def test_nothing_is_known_until_enough_audits_by_three_parties_were_clean() -> None:
    audits = each_of_each("abc", lambda by, of: 1e-3, times=3)
    known = after(audits[: LEAST_AUDITS - 1])
    assert found(known) is None
    assert found(after(audits[:LEAST_AUDITS])) == 1e-3
    assert found(after(audit("a", "b", 0.0) for _ in range(100))) is None
    assert found(after(each_of_each("ab", lambda by, of: 0.0, times=100))) is None
    unclean = [audit("a", "b", 0.5, clean=False), audit("a", "b", 0.5, kinds=())]
    assert after(unclean, known) == known


def test_the_largest_error_counts() -> None:
    known = after(each_of_each("abc", lambda by, of: 1e-4))
    assert found(known) == 1e-4
    known = after(each_of_each("abc", lambda by, of: 2e-3, times=1), known)
    assert found(after(each_of_each("abc", lambda by, of: 0.0), known)) == 2e-3


def test_each_sort_of_comparison_is_learned_by_itself_whichever_device_audits() -> None:
    known = after(each_of_each("abc", lambda by, of: 0.0))
    other = audit("a", "b", 0.01, kinds=("cuda y", "cpu x")), audit("b", "a", 0.01, kinds=("cpu x", "cuda y"))
    known = after(other, known)
    assert found(known) == 0.0
    assert len(known) == 2


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.data())
def test_whatever_a_minority_does_and_says_honest_ones_are_believed(liars: int, data: st.DataObject) -> None:
    """A liar says anything of others' work. Its own is as wrong as it likes, and never less than what rounding makes of it."""
    names = "abcdefghi"[: 2 * liars + 1 + data.draw(st.integers(0, 2))]
    lying = names[:liars]
    said = st.floats(0, 0.05)

    def error(by: str, of: str) -> float:
        if by in lying:
            return data.draw(said)
        return max(0.004, data.draw(said)) if of in lying else 0.004

    assert found(after(each_of_each(names, error, times=3))) == 0.004


def test_what_a_liar_said_is_forgotten_when_it_goes() -> None:
    known = after(each_of_each("abcd", lambda by, of: 0.03 if "a" in (by, of) else 0.0))
    assert found(known) == 0.0
    fewer = without(known, "a")
    assert {row.largest for row in fewer[SORT]} == {0.0}
    assert found(fewer) == 0.0
    assert without(without(fewer, "b"), "c") == {}


def test_what_is_remembered_is_bounded_and_the_most_audited_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "MOST_ROWS", 8)
    monkeypatch.setattr(rounding, "MOST_SORTS", 3)
    known = after(each_of_each("abc", lambda by, of: 0.0))
    strangers = [audit(f"stranger {number}", "a", 0.04) for number in range(50)]
    known = after(strangers, known)
    assert len(known[SORT]) == 8
    assert found(known) is not None
    known = after((audit("a", "b", 0.0, kinds=("cpu x", f"cuda {number}")) for number in range(50)), known)
    assert len(known) == 3
    assert SORT in known, "who claims many devices makes nobody forget what is known of others"

"""Of the outer steps that islands tried, the one with the least loss is chosen, and a minority cannot choose for the others."""

from __future__ import annotations

from hypothesis import given, strategies as st

from dtfm.coordinator.log.outer import Looked
from dtfm.protos.outer import OuterStep

STEPS = OuterStep(1.0, 0.0), OuterStep(0.7, 0.9), OuterStep(1.0, 0.65)

losses = st.tuples(*[st.floats(0.1, 10)] * len(STEPS))
voices = st.lists(losses, min_size=1, max_size=7)


def looked(told: list[tuple[float, ...]]) -> Looked:
    return Looked(STEPS, {str(number): each for number, each in enumerate(told)}, 1.0)


@given(told=losses)
def test_one_voice_chooses_its_least_loss(told: tuple[float, ...]) -> None:
    best = looked([told]).best
    assert told[STEPS.index(best)] == min(told)


@given(told=voices)
def test_the_last_choice_stays_unless_more_than_half_of_the_voices_find_another_better(
    told: list[tuple[float, ...]],
) -> None:
    chosen = STEPS.index(looked(told).best)
    assert chosen == 0 or sum(each[chosen] < each[0] for each in told) > len(told) / 2


@given(honest=losses, count=st.integers(1, 4), lies=st.lists(losses, max_size=3))
def test_liars_who_are_fewer_change_nothing(
    honest: tuple[float, ...], count: int, lies: list[tuple[float, ...]]
) -> None:
    """Where the honest find the same."""
    lies = lies[: count - 1]
    assert looked([honest] * count + lies).best == looked([honest]).best


@given(told=voices, data=st.data())
def test_the_order_of_the_voices_changes_nothing(told: list[tuple[float, ...]], data: st.DataObject) -> None:
    assert looked(data.draw(st.permutations(told))).best == looked(told).best


def test_of_equals_it_is_the_last_choice() -> None:
    assert looked([(2.0, 2.0, 2.0)]).best == STEPS[0]

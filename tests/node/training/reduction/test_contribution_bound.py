"""In an open run, no replica drowns the others: addends are held within their expected size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from dtfm.node.model.placement import Group
from dtfm.node.training.reduction.contribution_bound import (
    AVERAGE,
    MOST,
    Addend,
    ContributionBound,
    Place,
    allowance,
    expected,
    moved,
)

SIZES = st.floats(1e-6, 1e6)
HERE = Place(0, 0, 4096)


def group(*loads: int) -> Group:
    names = tuple("abcdefgh"[: len(loads)])
    return Group(names, names, (0,) * len(loads), loads, (0,) * len(loads))


def hold(bound: ContributionBound, who: Group, *scales: float, seed: int = 0) -> list[float]:
    """The sizes of the members' addends after ``bound`` held them, as node a does; they were random, of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    pieces = [scale * torch.randn(4096, generator=generator) for scale in scales]
    bound.hold(HERE, who, 0, pieces)
    return [piece.square().mean().sqrt().item() for piece in pieces]


@given(
    own=SIZES, others=st.lists(st.floats(0.3, 3), min_size=1, max_size=6), loads=st.lists(st.integers(1, 9), min_size=7)
)
def test_addends_near_each_other_keep_their_bits(own: float, others: list[float], loads: list[int]) -> None:
    """Whatever the loads, for any sum of equal micro-batches, whether they agree or are noise."""
    for of_load in (math.sqrt, float):
        sizes = [own * other * of_load(load) for other, load in zip([1.0, *others], loads, strict=False)]
        pieces = [size * torch.ones(8) for size in sizes]
        before = [piece.clone() for piece in pieces]
        bound = ContributionBound()
        bound.hold(HERE, group(*loads[: len(pieces)]), 0, pieces)
        assert all(torch.equal(a, b) for a, b in zip(pieces, before, strict=True))
        assert not bound.clipped


def test_one_that_is_thirty_times_too_large_is_clipped_and_over_many_steps_adds_little_more_than_others() -> None:
    bound, added = ContributionBound(), 0.0
    for step in range(60):
        bound.begin()
        sizes = hold(bound, group(1, 1, 1, 1), 1, 1, 1, -30, seed=step)
        assert sizes[:3] == pytest.approx([1, 1, 1], rel=0.05)
        assert set(bound.clipped) == {"d"}
        added += sizes[3]
        bound.commit()
    assert added / 60 <= AVERAGE * 1.25
    assert bound.clipped == {}


def test_an_honest_one_may_be_much_larger_now_and_then() -> None:
    bound = ContributionBound()
    for step in range(100):
        bound.begin()
        hold(bound, group(1, 1, 1), 1, 1, 6 if step % 20 == 10 else 1, seed=step)
        assert not bound.clipped, step
        bound.commit()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_not_finite_is_left_out(value: float) -> None:
    pieces = [torch.ones(10), torch.ones(10), torch.full((10,), value)]
    bound = ContributionBound()
    bound.hold(HERE, group(1, 1, 1), 0, pieces)
    assert pieces[2].eq(0).all()
    assert bound.clipped["c"].worst == math.inf


def test_a_replica_without_micro_batches_adds_nothing() -> None:
    pieces = [torch.ones(10), torch.full((10,), 0.01), torch.zeros(10)]
    bound = ContributionBound()
    bound.hold(HERE, group(2, 0, 0), 0, pieces)
    assert pieces[1].eq(0).all()
    assert set(bound.clipped) == {"b"}


def test_small_addends_of_liars_do_not_make_honest_ones_smaller() -> None:
    """Two of four say almost nothing: an honest addend is still measured by this node's own."""
    bound = ContributionBound()
    assert hold(bound, group(1, 1, 1, 1), 1, 1, 1e-9, 1e-9)[1] == pytest.approx(1, rel=0.05)
    assert not bound.clipped


def test_two_liars_who_agree_do_not_raise_the_bound() -> None:
    bound = ContributionBound()
    sizes = hold(bound, group(1, 1, 1), 1, 30, 30)
    assert max(sizes[1:]) <= MOST * 1.1
    assert set(bound.clipped) == {"b", "c"}


def test_where_others_happen_to_be_zero_what_was_usual_decides() -> None:
    """As in a part of the vocabulary that one replica's text has and the others' has not."""
    bound = ContributionBound()
    assert hold(bound, group(1, 1, 1), 0, 0, 1)[2] == pytest.approx(1, rel=0.05)  # nothing is known yet
    bound.begin()
    hold(bound, group(1, 1, 1), 1, 1, 1)
    bound.commit()
    assert hold(bound, group(1, 1, 1), 0, 0, 1)[2] == pytest.approx(1, rel=0.05)
    assert hold(bound, group(1, 1, 1), 0, 0, 1000)[2] <= MOST * 1.1


def test_a_step_that_is_done_again_counts_once() -> None:
    twice, once = ContributionBound(), ContributionBound()
    for bound, attempts in ((twice, 2), (once, 1)):
        for _ in range(attempts):
            bound.begin()
            hold(bound, group(1, 1), 1, 20)
        bound.commit()
    assert hold(twice, group(1, 1), 1, 20) == hold(once, group(1, 1), 1, 20)


def test_what_is_usual_does_not_grow_by_changes_of_load() -> None:
    bound = ContributionBound()
    for load in (1, 16) * 20:
        bound.begin()
        hold(bound, group(load, load), math.sqrt(load), math.sqrt(load))
        bound.commit()
    bound.begin()
    assert hold(bound, group(1, 1), 1, 1000)[1] <= MOST * 1.2


def test_who_has_used_up_its_allowance_gets_no_other_with_a_new_stage() -> None:
    bound = ContributionBound()
    for _ in range(3):
        bound.begin()
        hold(bound, group(1, 1, 1), 1, 1, 50)
        bound.commit()
    again = ContributionBound(bound)
    assert hold(again, group(1, 1, 1), 1, 1, 50)[2] <= 2
    assert hold(ContributionBound(), group(1, 1, 1), 1, 1, 50)[2] > 5


def test_a_tied_parameter_is_compared_within_each_stage() -> None:
    """The gradient of an embedding that is also the head is larger on the last stage."""
    who = Group(("a", "b", "c", "d"), ("a", "b"), (0, 0, 1, 1), (1, 1, 1, 1), (0, 0, 0, 0))
    bound = ContributionBound()
    assert hold(bound, who, 1, 1, 100, 100)[2:] == pytest.approx([100, 100], rel=0.05)
    assert hold(bound, who, 1, 1, 100, 1e5)[3] <= 100 * MOST * 1.1


@given(average=st.floats(0, AVERAGE))
def test_nobody_exceeds_the_average_by_using_up_the_allowance(average: float) -> None:
    assert moved(average, allowance(average)) <= AVERAGE + 1e-9


def test_a_node_believes_its_own_addend() -> None:
    addends = [Addend(0, 1, 5.0), Addend(0, 1, 1.0), Addend(0, 1, 1.0)]
    assert expected(addends, 1, 0, {}, {}) == 5.0
    assert expected(addends, 1, 2, {}, {}) == 1.0


def test_what_is_usual_in_one_place_says_nothing_about_another() -> None:
    """The first stage adds to the rows of tokens that occur. Once the shards are others, so are the rows that this node adds
    up."""
    stages = Group(("a", "b"), ("a", "b"), (1, 0), (4, 4), (0, 0))
    bound, rare, frequent = ContributionBound(), Place(0, 0, 8), Place(0, 8, 16)
    for place, size in ((rare, 0.01), (frequent, 1.0), (frequent, 1.0)):
        bound.begin()
        bound.hold(place, stages, 0, [torch.ones(8), torch.full((8,), size)])
        assert not bound.clipped
        bound.commit()
    bound.begin()
    bound.hold(frequent, stages, 0, [torch.ones(8), torch.full((8,), 30.0)])
    assert set(bound.clipped) == {"b"}


def test_a_rare_token_may_occur_in_the_text_of_one_replica_just_when_the_shards_are_new() -> None:
    bound = ContributionBound()
    for place in (Place(0, 0, 8), Place(0, 8, 16)):
        bound.begin()
        bound.hold(place, group(1, 1, 1), 0, [torch.ones(8) for _ in range(3)])
        bound.commit()
    bound.begin()
    bound.hold(Place(0, 4, 12), group(1, 1, 1), 0, [torch.full((8,), size) for size in (0.01, 0.01, 1.0)])
    assert not bound.clipped
    bound.hold(Place(0, 4, 12), group(1, 1, 1), 0, [torch.full((8,), size) for size in (0.01, 0.01, 30.0)])
    assert set(bound.clipped) == {"c"}

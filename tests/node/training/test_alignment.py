"""Who adds gradients that point elsewhere than the others' is noticed."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dtfm.node.model.placement import Group
from dtfm.node.training.alignment import KNOWN_AFTER_STEPS, Alignment, Leaning, cosines, who_leans_away
from dtfm.node.training.contribution_bound import Clipped
from dtfm.node.training.usual import MOST_DEVIATIONS, Unusual
from dtfm.protos.frame import Kind

Change = Callable[[torch.Tensor], torch.Tensor]
BUCKETS = 3


def group(members: int, stages: int = 1) -> Group:
    names = tuple("abcdefgh"[:members])
    return Group(names, names, tuple(range(members)) if stages > 1 else (0,) * members, (2,) * members)


class Steps:
    """Steps of some members with gradients that have so much in common: ``signal`` to 1 of noise. The last member lies."""

    def __init__(self, members: int, signal: float, seed: int = 0, stages: int = 1) -> None:
        self.watch = Alignment()
        self.group, self.signal = group(members, stages), signal
        self.chance = torch.Generator().manual_seed(seed)

    def step(self, lie: Change = lambda mine: mine, commit: bool = True) -> list[Unusual]:
        self.watch.begin()
        for bucket in range(BUCKETS):
            common = self.signal * torch.randn(512, generator=self.chance)
            addends = [common + torch.randn(512, generator=self.chance) for _ in self.group.members]
            addends[-1] = lie(addends[-1])
            self.watch.look(bucket, self.group, 0, addends)
        found = self.watch.unusual({})
        if commit:
            self.watch.commit()
        return found


@pytest.mark.parametrize("members", [2, 3, 8])
@pytest.mark.parametrize("signal", [0.0, 0.2, 1.0])
def test_honest_replicas_raise_no_alarm_however_noisy_their_gradients_are(members: int, signal: float) -> None:
    steps = Steps(members, signal)
    assert not any(steps.step() for _ in range(100))


@pytest.mark.parametrize("members", [2, 3, 8])
def test_who_turns_the_sign_is_noticed_as_soon_as_it_is_known(members: int) -> None:
    steps = Steps(members, signal=1.0)
    found = [steps.step(torch.neg) for _ in range(KNOWN_AFTER_STEPS)]
    assert not any(found[:-1])
    assert {(each.node, each.kind) for each in found[-1]} == {("abcdefgh"[members - 1], Kind.REDUCE)}


@pytest.mark.parametrize("members", [3, 8])
def test_who_begins_to_turn_the_sign_is_noticed_within_a_handful_of_steps(members: int) -> None:
    steps = Steps(members, signal=1.0)
    for _ in range(30):
        assert not steps.step()
    found = [{each.node for each in steps.step(torch.neg)} for _ in range(6)]
    assert {"abcdefgh"[members - 1]} in found
    assert all(of in (set(), {"abcdefgh"[members - 1]}) for of in found)


def test_who_adds_nothing_where_others_do_is_noticed_at_once() -> None:
    (found,) = Steps(3, signal=1.0).step(torch.zeros_like)
    assert (found.node, found.deviations) == ("c", MOST_DEVIATIONS)


def test_what_was_clipped_is_unusual_in_the_bucket_that_was_worst() -> None:
    alignment = Alignment()
    clipped = Clipped().and_another(30.0, 1).and_another(math.inf, 2).and_another(2.0, 3)
    assert alignment.unusual({"c": clipped}) == [Unusual("c", Kind.REDUCE, 2, MOST_DEVIATIONS)]


def test_addends_of_several_stages_are_not_compared() -> None:
    steps = Steps(3, signal=1.0, stages=3)
    assert not any(steps.step(torch.neg) for _ in range(10))


def test_a_step_that_is_not_committed_is_forgotten() -> None:
    steps = Steps(3, signal=1.0)
    assert not any(steps.step(torch.neg, commit=False) for _ in range(3 * KNOWN_AFTER_STEPS))


def test_another_generation_of_the_same_stage_remembers_its_members_and_nobody_else() -> None:
    steps = Steps(3, signal=1.0)
    for _ in range(KNOWN_AFTER_STEPS):
        steps.step(torch.neg)
    steps.watch = Alignment("abc", steps.watch)
    assert steps.step(torch.neg)
    steps.watch = Alignment("ab", steps.watch)
    assert not steps.step(torch.neg)


@given(st.lists(st.lists(st.floats(), min_size=3, max_size=3), min_size=2, max_size=4))
def test_whatever_is_added_there_are_cosines_or_none(rows: list[list[float]]) -> None:
    with np.errstate(all="ignore"):
        products = np.array(rows) @ np.array(rows).T
    assert all(found is None or -1 <= found <= 1 for found in cosines(products))


def test_the_cosines_are_those_to_the_sum_of_the_others() -> None:
    rows = np.random.default_rng(0).normal(size=(4, 100))
    for rank, found in enumerate(cosines(rows @ rows.T)):
        others = rows.sum(axis=0) - rows[rank]
        assert found == pytest.approx(rows[rank] @ others / np.linalg.norm(rows[rank]) / np.linalg.norm(others))


def test_nobody_doubts_itself_or_who_is_not_known_yet() -> None:
    known = {name: Leaning(cosine, 9, 99) for name, cosine in (("a", 0.8), ("b", 0.7), ("c", -0.6))}
    assert who_leans_away(known, "a").keys() == {"c"}
    assert not who_leans_away(known, "c")
    assert not who_leans_away({**known, "c": Leaning(-0.6, KNOWN_AFTER_STEPS - 1, 99)}, "a")
    assert not who_leans_away({**known, "c": Leaning(-0.6, 9, 3)}, "a")

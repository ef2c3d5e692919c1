"""Which work is done again: unforeseeable, at the rate, by others."""

from __future__ import annotations

from random import Random
from zlib import crc32

import pytest
from hypothesis import given, strategies as st

from dtfm.coordinator.core.trust.draw import MOST_EACH, chance, draw, odds
from dtfm.scheduler.model.chains import chains, micro_batches_of
from dtfm.scheduler.model.plan import Plan, Stage, from_routes

RATES = st.floats(0.001, 1.0)


def plan_of(stages: list[int], micro_batches: int = 12) -> Plan:
    """So many replicas a stage, with names like "1b", and as even loads as can be."""
    groups = [[f"{index}{'abcdefgh'[place]}" for place in range(size)] for index, size in enumerate(stages)]
    layers = [Stage((index, index + 1), tuple(group), ()) for index, group in enumerate(groups)]
    ways = [tuple(group[number % len(group)] for group in groups) for number in range(micro_batches)]
    return from_routes(1, layers, [(way, ways.count(way)) for way in dict.fromkeys(ways)])


PLANS = st.builds(plan_of, st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 20))


def itself(name: str) -> str:
    return name


@given(PLANS, RATES, st.integers(0, 2**32), st.integers(1, 5), st.sets(st.sampled_from(["0a", "0b", "1a", "1b", "2c"])))
def test_only_other_parties_of_the_same_stage_audit_and_only_what_they_can(
    plan: Plan, rate: float, seed: int, parties: int, forgot: set[str]
) -> None:
    def party(name: str) -> str:
        return str(crc32(name.encode()) % parties)

    kept = set(plan.nodes) - forgot
    drawn = draw(plan, rate, Random(seed), party, kept)
    assert len({each.node for each in drawn}) == len(drawn), "one audit of each node"
    for each in drawn:
        assert plan.stage_of(each.node) == plan.stage_of(each.by)
        assert party(each.node) != party(each.by)
        assert each.by in kept
        share = micro_batches_of(plan)[each.node]
        assert set(each.micro_batches) <= set(share)
        assert each.micro_batches
        assert each.whole == (each.micro_batches == share)
        at = plan.stage_of(each.node)
        assert at is not None
        for number in each.micro_batches:
            chain = chains(plan)[number]
            beside = {*chain[max(0, at - 1) : at], *chain[at + 1 : at + 2]}
            assert {name for name in beside if party(name) != party(each.node)} <= kept


@given(PLANS, RATES, st.integers(0, 2**32))
def test_nobody_does_more_than_two_audits_where_each_is_a_party_of_its_own(plan: Plan, rate: float, seed: int) -> None:
    drawn = draw(plan, rate, Random(seed), itself, plan.nodes)
    assert all(sum(each.by == by for each in drawn) <= MOST_EACH for by in plan.nodes)


@pytest.mark.parametrize("others", [1, 2])
def test_a_party_gains_nothing_by_many_names_in_a_stage(others: int) -> None:
    """Though few are there to do their work again."""
    plan = plan_of([8])
    strange = [f"0{letter}" for letter in "abcdefgh"[others:]]
    for seed in range(200):
        drawn = draw(plan, 1.0, Random(seed), lambda name: "many" if name in strange else name, plan.nodes)
        assert {each.node for each in drawn} >= set(strange)


def test_a_party_does_not_get_past_audits_by_saying_that_its_own_name_in_the_next_stage_kept_nothing() -> None:
    plan, kept = plan_of([2, 2]), {"0a", "0b", "1b"}
    apart = draw(plan, 1.0, Random(0), itself, kept)
    assert "0a" not in {each.node for each in apart}
    bound = draw(plan, 1.0, Random(0), lambda name: "its key" if name in ("0a", "1a") else name, kept)
    assert {each.node for each in bound} >= {"0a"}


@given(RATES, st.integers(1, 1000), st.floats(0.0, 20.0))
def test_the_odds_come_to_the_rate_times_the_weight_or_to_all(rate: float, most: int, weight: float) -> None:
    odd = odds(rate, most, weight)
    assert odd.whole + odd.part * odd.share == pytest.approx(min(rate * weight, 1.0))
    assert odd.whole + odd.part <= 1 + 1e-9
    assert odd.share <= 1 + 1e-9


def test_what_is_done_again_beyond_the_rate_is_whole_shares() -> None:
    usual, more = odds(0.02, 15), odds(0.02, 15, 5.0)
    assert (more.part, more.share) == pytest.approx((usual.part, usual.share))
    assert more.whole == pytest.approx(0.09)


@pytest.mark.parametrize("rate", [pytest.param(0.02, marks=pytest.mark.soak), 0.1, 0.5, 1.0])
@pytest.mark.parametrize(("stages", "micro_batches"), [([4], 64), ([2, 3], 12), ([3], 3)])
def test_over_many_steps_the_share_of_the_work_that_is_done_again_is_the_rate(
    rate: float, stages: list[int], micro_batches: int
) -> None:
    plan, steps = plan_of(stages, micro_batches), round(400 / rate)
    done = sum(
        len(each.micro_batches)
        for step in range(steps)
        for each in draw(plan, rate, chance(bytes(32), 1, step), itself, plan.nodes)
    )
    assert done / (steps * micro_batches * len(stages)) == pytest.approx(rate, rel=0.12)


def test_most_steps_are_not_audited_at_a_small_rate_and_then_all_nodes_are_at_once() -> None:
    plan = plan_of([4, 4], 120)
    counts = [len(draw(plan, 0.02, Random(seed), itself, plan.nodes)) for seed in range(2000)]
    assert sum(count > 0 for count in counts) == pytest.approx(0.16 * 2000, rel=0.15)
    assert sum(count == 8 for count in counts) > 0.9 * sum(count > 0 for count in counts)


def test_a_node_of_more_weight_is_audited_more_and_a_node_without_weight_is_not() -> None:
    plan = plan_of([3], 30)
    drawn = [
        each
        for seed in range(3000)
        for each in draw(plan, 0.02, Random(seed), itself, plan.nodes, {"0a": 8.0, "0b": 1.0, "0c": 0.0}.__getitem__)
    ]
    work = {node: sum(len(each.micro_batches) for each in drawn if each.node == node) for node in plan.nodes}
    assert work["0a"] == pytest.approx(8 * work["0b"], rel=0.3)
    assert work["0c"] == 0


def test_all_is_done_again_at_rate_one() -> None:
    plan = plan_of([2, 3], 12)
    assert {each.node for each in draw(plan, 1.0, Random(0), itself, plan.nodes) if each.whole} == set(plan.nodes)


def test_the_draw_follows_from_the_secret_and_differs_with_each_part() -> None:
    one, other = bytes(32), bytes([1]) * 32
    assert chance(one, 1, 2).random() == chance(one, 1, 2).random()
    others = [chance(one, 1, 2), chance(one, 2, 2), chance(one, 1, 3), chance(other, 1, 2)]
    assert len({random.random() for random in others}) == 4

"""What islands cost in tokens: this run's exchanges count more and more against those of other runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from dtfm.coordinator.core.plan.islands_cost import islands_cost, tokens_shown
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.spread import MOST_NOISE, REMEMBERED, Spread
from dtfm.scheduler.cost.exchange import tokens_needed
from dtfm.scheduler.model.workload import Layer, Workload
from tests.coordinator.islands import ROUNDS, each_alone
from tests.coordinator.script import fresh_state

SMALL = Workload((Layer("x", 1e9, 4e6, 1e5),), 8)

spreads = st.builds(Spread, st.integers(2, 8), st.floats(1, 1000), st.floats(0, MOST_NOISE))


def after(*spreads: Spread, **changes: dict[str, str]) -> State:
    state = fresh_state(**changes)
    training = replace(state.ledger.training, spreads=spreads)
    return replace(state, ledger=replace(state.ledger, training=training))


@given(spread=spreads)
def test_islands_need_at_least_the_tokens_of_one_and_at_most_the_root_of_their_number(spread: Spread) -> None:
    assert 1 <= tokens_shown(spread) <= spread.islands**0.5 + 1e-9


@given(spread=spreads, more=st.floats(1, 10))
def test_more_noise_takes_more_tokens(spread: Spread, more: float) -> None:
    assert tokens_shown(replace(spread, noise=more * spread.noise)) >= tokens_shown(spread) - 1e-9


def test_before_the_first_exchange_other_runs_count_alone() -> None:
    assert islands_cost(after(), SMALL) == 1


def test_the_more_exchanges_agree_the_more_they_count() -> None:
    spread = Spread(8, 30.0, 0.0)
    costs = [islands_cost(after(*[spread] * count), SMALL) for count in range(REMEMBERED + 1)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == pytest.approx(2 / (2 + REMEMBERED))


def test_the_planner_takes_the_tokens_that_the_run_has_shown() -> None:
    spread = Spread(8, 30.0, 0.02)
    cost = islands_cost(after(*[spread] * REMEMBERED), SMALL)
    usual, shown = tokens_needed(8, SMALL, 30), tokens_shown(spread)
    needed = tokens_needed(8, replace(SMALL, islands_cost=cost), 30)
    assert needed - 1 == pytest.approx((2 * (usual - 1) + REMEMBERED * (shown - 1)) / (2 + REMEMBERED))


@pytest.mark.parametrize("codec", ["topk", "top64"])
def test_under_a_sparse_codec_nothing_is_known(codec: str) -> None:
    assert islands_cost(after(Spread(8, 30.0, 0.0), network={"exchange": codec}), SMALL) == 1


def test_an_exchange_logs_how_far_its_islands_changes_were_and_the_next_plan_counts_it() -> None:
    world = each_alone("a", "b", "c")
    while not world.state.rounds.exchanges(world.state.ledger.training.step + 1):
        world.step()
    for node in world.plan_in_force.nodes:
        world.vote(node, samples=0, loss_sum=0.0, squared_gradient_norm=1.0, squared_change_norm=4.0)
    assert world.events(ev.StepCommitted)[-1].change_norms == {"0": 2.0, "1": 2.0, "2": 2.0}
    (spread,) = world.state.ledger.training.spreads
    assert (spread.islands, spread.length) == (3, ROUNDS)
    assert spread.noise > 1
    assert world.refolded().training.spreads == (spread,)
    world.join("d")
    assert world.state.planner.number

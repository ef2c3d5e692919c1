"""The horizon over which a move must pay follows from how often plans have lost nodes: `core/plan/planner_input.py`."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, strategies as st

from dtfm.coordinator.core.plan.planner_input import horizon_seconds
from dtfm.coordinator.log.training import MOST_LOSSES
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.decision import HORIZON_SECONDS
from tests.coordinator.script import LONG, training

LOSSES = st.lists(st.integers(0, 10**6), max_size=MOST_LOSSES).map(sorted)
SECONDS = st.floats(1e-3, 1e4)
FAR = 10**9
"""Steps until the end of a run that hardly ends."""


def test_a_run_that_has_seen_nothing_yet_has_the_usual_horizon() -> None:
    assert horizon_seconds((), 0, FAR, None) == HORIZON_SECONDS
    assert horizon_seconds((), 0, FAR, 2.0) == HORIZON_SECONDS


@given(LOSSES, st.integers(0, 10**6), st.integers(0, FAR), st.none() | SECONDS)
def test_it_is_a_number_of_seconds_and_at_least_one(
    losses: list[int], step: int, left: int, seconds: float | None
) -> None:
    assert 1.0 <= horizon_seconds(losses, step, left, seconds) < math.inf


@given(LOSSES, st.integers(0, 10**6), st.integers(0, 10**6), SECONDS)
def test_it_grows_while_nothing_is_lost(losses: list[int], since: int, more: int, seconds: float) -> None:
    step = max([0, *losses]) + since
    assert horizon_seconds(losses, step + more, FAR, seconds) >= horizon_seconds(losses, step, FAR, seconds)


@given(st.lists(st.integers(0, 10**6), max_size=MOST_LOSSES - 2).map(sorted), st.integers(0, 10**6), SECONDS)
def test_it_falls_with_each_loss(losses: list[int], since: int, seconds: float) -> None:
    step = max([0, *losses]) + since
    assert horizon_seconds([*losses, step], step, FAR, seconds) < horizon_seconds(losses, step, FAR, seconds)


@given(LOSSES, st.integers(0, 10**6), st.integers(0, 10**6), SECONDS)
def test_nothing_pays_after_the_end_of_the_run(losses: list[int], step: int, left: int, seconds: float) -> None:
    assert horizon_seconds(losses, step, left, seconds) <= max(1.0, left * seconds)


@given(st.integers(1, 10**5), SECONDS)
def test_with_a_loss_every_so_many_steps_it_becomes_about_their_time(every: int, seconds: float) -> None:
    assume(every * seconds > HORIZON_SECONDS)
    losses = [every * number for number in range(100, 100 + MOST_LOSSES)]
    found = horizon_seconds(losses, losses[-1], FAR, seconds)
    assert found == pytest.approx(every * seconds, rel=2 / MOST_LOSSES)


def test_what_the_planner_is_told_follows_from_nodes_of_the_plan_that_are_lost_or_want_to_leave() -> None:
    world = training("a", "b", "c", "d", **LONG)
    for _ in range(10):
        world.now += 3.0
        world.step()
    world.stick_to_plan()
    world.join("f")
    world.lose("f")  # it had no part
    assert not world.state.ledger.training.losses
    step, seconds = world.state.ledger.training.step, world.state.ledger.training.step_seconds
    world.automatic_planning = False  # the plan is carried on, and a better one asked for
    world.lose("a")
    world.lose("d")
    world.settle()
    assert world.state.ledger.training.losses == (step,)
    assert world.wanted[-1].horizon == horizon_seconds((step,), step, 500 - step, seconds) < HORIZON_SECONDS
    world.step()
    world.hear("b", leaving=wire.Leaving(reason="its owner wants to play"))
    assert world.state.ledger.training.losses == world.refolded().training.losses == (step, step + 1)

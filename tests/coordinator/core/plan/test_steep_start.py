"""With `rounds = "auto"` islands begin when the loss has left its steep start."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from dtfm.coordinator.core.plan.asking import round_lengths
from dtfm.coordinator.core.plan.steep_start import LEAST, STEEP, Fall, fall_of
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.recent_losses import WINDOW
from tests.coordinator.core.plan.test_rounds import AUTO, answer, asked
from tests.coordinator.script import World

LONG: dict[str, Any] = {**AUTO, "steps": 500, "warmup_steps": 0}


def falling(part: float, count: int = WINDOW) -> list[float]:
    """Losses that fall by this part of themselves in 32 steps."""
    return [5 * (1 - part) ** (step / 32) for step in range(count)]


@given(part=st.floats(0, 0.5), count=st.integers(LEAST, WINDOW))
def test_the_fall_is_that_of_32_steps_however_many_losses_are_known(part: float, count: int) -> None:
    assert fall_of(falling(part, count)).part == pytest.approx(part, rel=0.35, abs=1e-9)


@given(losses=st.lists(st.floats(0.1, 20), min_size=LEAST, max_size=WINDOW), times=st.floats(0.01, 100))
def test_its_unit_does_not_matter(losses: list[float], times: float) -> None:
    assert fall_of([times * loss for loss in losses]).part == pytest.approx(fall_of(losses).part, rel=1e-6, abs=1e-9)


@given(losses=st.lists(st.floats(0.1, 20), max_size=LEAST - 1))
def test_too_few_losses_do_not_tell(losses: list[float]) -> None:
    assert fall_of(losses) == Fall(None)
    assert Fall(None).is_steep


@given(noise=st.lists(st.floats(-0.03, 0.03), min_size=WINDOW, max_size=WINDOW))
def test_a_flat_loss_with_usual_noise_is_not_steep_unless_half_of_it_is_one_sided(noise: list[float]) -> None:
    half = WINDOW // 2
    apart = abs(sum(noise[:half]) - sum(noise[half:])) / half
    assert fall_of([2 * (1 + each) for each in noise]).is_steep <= (apart > 0.9 * STEEP)


@pytest.mark.parametrize(
    ("fall", "sentence"),
    [
        (Fall(None), "Islands wait until 32 steps after the warm-up show that the loss has left its steep start."),
        (Fall(0.12), "Islands wait: the loss falls by 12% in 32 steps, and before this is at most 5% they would need"),
        (Fall(0.034), "Islands may begin: the loss has left its steep start (3.4% in 32 steps)."),
        (Fall(-0.2), "Islands may begin: the loss has left its steep start"),
    ],
)
def test_it_says_so(fall: Fall, sentence: str) -> None:
    assert fall.narrate().startswith(sentence)


def step(world: World, loss: float) -> None:
    for node in world.plan_in_force.nodes:
        vote = {"samples": 8, "loss_sum": 8 * loss} if node == "b" else {}
        world.vote(node, **vote)


def begun(**changes: dict[str, Any]) -> World:
    """A run has begun without rounds."""
    world = asked(calm=False, **{"train": LONG, **changes})
    answer(world, 0)
    world.settle()
    world.wanted = []
    return world


def test_the_first_plan_has_none_and_says_why() -> None:
    world = asked(calm=False, train=LONG)
    assert world.wanted[0].lengths == (0,)
    answer(world, 0)
    assert "Islands wait until 32 steps" in world.events(ev.PlanAdopted)[-1].reason


def test_when_the_loss_has_left_it_the_planner_is_asked_once_and_may_choose_them() -> None:
    world = begun()
    for loss in falling(0.3, 40):
        step(world, loss)
    assert not world.wanted
    assert round_lengths(world.state, hasty=False) == (0,)
    for _ in range(2 * WINDOW):
        step(world, 1.0)
    assert [wanted.lengths for wanted in world.wanted] == [(0, 10, 30, 100)]
    answer(world, 0)
    for _ in range(LEAST):
        step(world, 1.0)
    assert not world.wanted


def test_steps_of_the_warm_up_do_not_count() -> None:
    world = begun(train={**LONG, "warmup_steps": 100})
    for _ in range(100):
        step(world, 1.0)
    assert round_lengths(world.state, hasty=False) == (0,)
    for _ in range(LEAST):
        step(world, 1.0)
    assert round_lengths(world.state, hasty=False) == (0, 10, 30, 100)


def test_rounds_that_the_run_file_names_begin_at_once() -> None:
    assert asked(calm=False, train={**LONG, "rounds": 7}).wanted[0].lengths == (7,)

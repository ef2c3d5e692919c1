"""A spike of the loss is reported once, with commands that may help: `core/step/spikes.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dtfm.coordinator.core.step.spikes import IN_A_ROW, LEAST, LEAST_SHARE, spike
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.recent_losses import WINDOW, Kind, Recent
from tests.coordinator.core.plan.test_rollback import roll_back
from tests.coordinator.script import World, restarted, training

ROW, ENOUGH = IN_A_ROW["training"], LEAST["training"]

Draw = Callable[[np.random.Generator, int], np.ndarray]


def alarms(losses: Iterable[float], kind: Kind) -> list[int]:
    """The numbers of the losses that are reported as spikes."""
    recent, told = Recent(), list[int]()
    for number, loss in enumerate(losses, 1):
        recent = recent.with_loss(number, loss)
        found = spike([each for _, each in recent.losses], IN_A_ROW[kind], LEAST[kind]) if not recent.spiked else None
        if found is not None:
            told.append(number)
            recent = replace(recent, spiked=number, limit=found.limit)
    return told


def remembering(noise: np.ndarray, much: float) -> np.ndarray:
    """Noise in which each value contains this fraction of the previous value."""
    found, last = np.empty_like(noise), 0.0
    for number, each in enumerate(noise):
        found[number] = last = much * last + (1 - much**2) ** 0.5 * each
    return found


NOISE: dict[str, Draw] = {
    "normal": lambda some, n: some.normal(0, 0.1, n),
    "heavy tails": lambda some, n: some.standard_t(3, n) * 0.05,
    "skewed": lambda some, n: some.lognormal(0, 0.5, n) * 0.2,
    "two kinds of batches": lambda some, n: np.where(some.random(n) < 0.2, 1.0, 0.0) + some.normal(0, 0.02, n),
    "with memory": lambda some, n: remembering(some.normal(0, 0.05, n), 0.5),
}


def falling(draw: Draw, seed: int, steps: int = 2000) -> list[float]:
    """Losses of a run that learns as runs do, with this noise."""
    noise = draw(np.random.default_rng(seed), steps)
    return [float(loss) for loss in 2 + 8 * np.arange(1, steps + 1) ** -0.3 + 2.5 * noise]


@pytest.mark.parametrize("kind", ["training", "held-out"])
@pytest.mark.parametrize("name", NOISE)
def test_ordinary_noise_is_no_spike(name: str, kind: Kind) -> None:
    for seed in range(3):
        assert alarms(falling(NOISE[name], seed), kind) == []


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NOISE)
def test_of_many_steps_with_ordinary_noise_hardly_any_is_a_spike(name: str) -> None:
    """At most one in 100,000."""
    assert sum(len(alarms(falling(NOISE[name], seed), "training")) for seed in range(100)) <= 2


@given(st.lists(st.floats(-10, 10), min_size=ROW, max_size=WINDOW), st.floats(0.01, 100))
@settings(max_examples=settings().max_examples // 2)
def test_it_does_not_depend_on_the_scale_and_a_spike_is_above_all_before(losses: list[float], scale: float) -> None:
    found = spike(losses, ROW, ENOUGH)
    scaled = spike([scale * loss for loss in losses], ROW, ENOUGH)
    if found is not None:
        before, last = losses[:-ROW], losses[-ROW:]
        assert len(before) >= ENOUGH
        assert min(last) > found.limit >= max(before)
        assert found.limit >= found.usual + LEAST_SHARE * abs(found.usual)
    if found is not None and min(losses[-ROW:]) > found.limit + 1e-6:
        assert scaled is not None
        assert scaled.usual == pytest.approx(scale * found.usual)


@given(seed=st.integers(0, 999), name=st.sampled_from(["normal", "heavy tails"]), height=st.floats(10, 1e6))
@settings(max_examples=settings().max_examples // 2)
def test_a_loss_that_jumps_and_stays_up_is_told_once_and_one_strange_batch_is_not(
    seed: int, name: str, height: float
) -> None:
    losses, at = falling(NOISE[name], seed, 300), 200
    assert alarms([*losses[:at], losses[at] + height, *losses[at + 1 :]], "training") == []
    raised = [loss + height * (number >= at) for number, loss in enumerate(losses)]
    (only,) = alarms(raised, "training")
    assert at < only <= at + ROW, "sooner if chance has raised the last losses before"
    again = [loss + height * (at <= number < at + 10 or number >= at + 40) for number, loss in enumerate(losses)]
    first, *others = alarms(again, "training")
    assert first == only
    assert not others or (len(others) == 1 and others[0] >= at + 40 + ROW), "a high loss may be usual by then"


SMALL = {"train": {"steps": 500, "evaluate_every": 0}, "checkpoint": {"every": 10, "keep": 20}}


def train(world: World, losses: Sequence[float]) -> None:
    for loss in losses:
        for node in world.plan_in_force.nodes:
            last = node == world.plan_in_force.stages[-1].replicas[0]
            world.vote(node, loss_sum=loss * 8 if last else 0.0)
        if world.state.safekeeping.snapshot is not None:
            world.save()


def usual(count: int) -> list[float]:
    return [2 + 0.01 * (number % 7) for number in range(count)]


def test_the_log_tells_of_a_spike_once_with_a_step_to_go_back_to_and_half_the_rate() -> None:
    world = training(**SMALL)
    train(world, [*usual(39), 9, 9, 9])  # the checkpoint of step 40 is one of the spike
    assert not world.events(ev.LossSpiked)
    train(world, [9.5, 9.5, 9.5])
    [told] = world.events(ev.LossSpiked)
    assert (told.step, told.since, told.kind, told.loss, told.back_to) == (43, 40, "training", 9.5, 30)
    assert told.usual == pytest.approx(2.03)
    assert told.limit == pytest.approx(2.03 * 1.05, rel=0.15)
    assert "`dtfm-coordinator rollback 30` goes back to step 30" in told.narrate()
    assert "`dtfm-coordinator set train.learning_rate=0.0015` halves the rate" in told.narrate()
    assert world.refolded() == world.state.ledger
    again = restarted(world, **SMALL)
    again.join("a", "b")
    again.settle()
    train(again, [9, 9, 9, 9, 9])
    assert not again.events(ev.LossSpiked), "it is the same spike"
    roll_back(again, told.back_to)
    again.settle()
    train(again, [*usual(5), 9, 9, 9, 9])
    assert [(e.step, e.since) for e in again.events(ev.LossSpiked)] == [(39, 36)], "it is another one"


def test_a_held_out_loss_spikes_too_and_exchanges_do_not_count() -> None:
    world = training(train={"steps": 500, "evaluate_every": 1}, checkpoint={"every": 0})
    for loss in [3.0, 2.9, 2.8, 2.7, 2.6, 2.5, 2.5, 2.4, 5.0, 5.0, 5.0]:
        world.step()
        world.evaluate(loss=loss)
    [told] = world.events(ev.LossSpiked)
    assert (told.kind, told.step, told.since, told.back_to) == ("held-out", 11, 9, 0)
    assert "`dtfm-coordinator rollback 0` goes back to the start" in told.narrate()

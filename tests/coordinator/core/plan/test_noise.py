"""Plans stay while speeds differ by noise alone, and change when a device becomes slow: `core/plan/noise.py` and `drift.py`, over
thousands of steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest

from dtfm.coordinator.core.plan import drift, noise
from dtfm.coordinator.core.state import Noise, Speeds
from dtfm.coordinator.log import events as ev
from tests.coordinator.busy_machine import NODES, BusyMachine, Slowness, busy, quiet


def changes(world: BusyMachine) -> int:
    """The number of plans after the first one."""
    return len(world.events(ev.PlanAdopted)) - 1


@pytest.mark.soak
def test_a_busy_machine_changes_few_plans() -> None:
    """With medians of five steps and a factor of 1.25, it was a plan in half a minute: 43 in these 8,000 steps (22 minutes)."""
    world = BusyMachine(busy(2))
    world.run(2500)
    assert changes(world) <= 4


@pytest.mark.soak
def test_a_busy_machine_changes_few_plans_for_long() -> None:
    world = BusyMachine(busy(1))
    world.run(8000)
    assert changes(world) <= 14


def test_a_machine_that_becomes_slower_for_all_its_nodes_keeps_the_plan_and_gets_another_price() -> None:
    world = BusyMachine()
    world.run(200)
    before = world.state.ledger.training.generation
    world.slowness = lambda now: dict.fromkeys(NODES, 2.0)
    world.run(300)
    assert world.state.ledger.training.generation == before
    assert world.state.ledger.training.predicted == pytest.approx(0.2, rel=0.1)
    assert {event.node for event in world.events(ev.DeviceDrifted)} == set(NODES)


@pytest.mark.parametrize("before", [quiet, busy(2)], ids=["quiet", "busy"])
def test_a_device_that_becomes_twice_as_slow_is_found_within_some_leases(before: Slowness) -> None:
    world = BusyMachine(before)
    world.run(200)
    since, usual = world.now, before

    def slowness(now: float) -> Mapping[str, float]:
        return {node: times * (2.0 if node == "c" else 1.0) for node, times in usual(now).items()}

    world.slowness = slowness
    while not (found := [e for e in world.events(ev.DeviceDrifted) if e.node == "c"]):
        world.run(1)
        assert world.now - since < 6 * world.state.lease
    assert "slower" in found[-1].reason
    world.run(100)
    (stage,) = world.plan_in_force.stages
    assert stage.loads[stage.replicas.index("c")] < 8


def found_after(speeds: list[float], apart: float, lasting: float = 10.0) -> int | None:
    """The number of steps, ``apart`` seconds from each other, after which a change from 1 is found; None: it is not."""
    known = Speeds(first=1.0)
    for number, speed in enumerate(speeds, 1):
        known, ratio = noise.compare(known, speed, number * apart, lasting, drift.DEVICE_OFF, drift.MOST_DEVICE_OFF)
        if ratio is not None:
            return number
    return None


def test_short_steps_count_by_time_and_long_ones_by_number() -> None:
    assert found_after([0.5] * 1000, 0.1) == pytest.approx(120, abs=5)
    assert found_after([0.5] * 20, 20.0) == 6


def test_what_changes_back_and_forth_has_to_last_longer_each_time_and_that_is_forgotten() -> None:
    known, now, waits = Speeds(first=1.0), 0.0, []
    for round_, speed in enumerate([0.5, 1.0, 0.5, 1.0]):
        since = now
        for _ in range(10_000):
            now += 1.0
            known, ratio = noise.compare(known, speed, now, 10.0, drift.DEVICE_OFF, drift.MOST_DEVICE_OFF)
            if ratio is not None:
                break
        waits.append(now - since)
        assert noise.reversals(known.noise, now, 10.0) == pytest.approx(round_, abs=0.1)
    assert waits[0] == waits[1] < waits[2] < waits[3]
    assert noise.reversals(known.noise, now + noise.FORGOTTEN_AFTER * 10.0 * 3, 10.0) == 0.0


def test_the_factor_grows_with_the_noise_up_to_a_limit() -> None:
    wild, random, level = Speeds(first=1.0), Random(1), 1.0
    for number in range(400):
        level = random.choice((0.81, 1.24)) if number % 10 == 0 else level  # each for a lease
        wild, _ = noise.compare(wild, level, float(number), 10.0, drift.DEVICE_OFF, drift.MOST_DEVICE_OFF)
    calm, wildest = Noise(), Noise(variance=100.0)
    least, most = (noise.threshold(each, drift.DEVICE_OFF, drift.MOST_DEVICE_OFF) for each in (calm, wildest))
    assert least < noise.threshold(wild.noise, drift.DEVICE_OFF, drift.MOST_DEVICE_OFF) <= most
    assert drift.MOST_DEVICE_OFF < drift.FACTOR  # so that a device of half its speed is found on any machine


def test_the_docs_name_the_factors_that_the_code_has() -> None:
    text = " ".join((Path(__file__).parents[4] / "docs" / "running.md").read_text().split())
    said = re.search(
        r"A device counts as changed from a factor of ([\d.]+) on, or up to ([\d.]+) .* "
        r"a link from a factor of (\d+) on, or up to (\d+)",
        text,
    )
    assert said is not None
    constants = (drift.DEVICE_OFF, drift.MOST_DEVICE_OFF, drift.FACTOR, drift.MOST_FACTOR)
    assert tuple(map(float, said.groups())) == constants
    assert f"at least {noise.WINDOW} steps" in text

"""Training notices devices and links whose speed changed, and ignores noise: `core/plan/drift.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from dtfm.coordinator.core.plan.drift import WINDOW, compare
from dtfm.coordinator.core.state import Speeds
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import fold
from dtfm.protos import control_pb2 as wire
from tests.coordinator.drifting import steady_run, timed_steps
from tests.coordinator.script import LEASE


def factors(speeds: list[float], *, lasting: float = 0.0) -> list[float]:
    """The changes that are found in these speeds, seen a second apart."""
    seen, found = Speeds(), []
    for second, speed in enumerate(speeds):
        seen, ratio = compare(seen, speed, float(second), lasting)
        found += [ratio] if ratio is not None else []
    return found


def test_a_lasting_change_is_found_once_and_so_is_its_reversal() -> None:
    assert factors([8.0] * 10 + [1.0] * 20) == [1 / 8]
    assert factors([8.0] * 10 + [1.0] * 20 + [8.0] * 20) == [1 / 8, 8]


def test_two_slow_steps_of_five_are_noise() -> None:
    assert factors([8.0] * 5 + [8.0, 1.0, 8.0, 1.0, 8.0] * 10) == []


def test_a_change_must_last() -> None:
    assert factors([8.0] * 10 + [1.0] * 10 + [8.0] * 10, lasting=10.0) == []
    assert factors([8.0] * 10 + [1.0] * 10 + [8.0] * 10 + [1.0] * 10, lasting=10.0) == []
    assert factors([8.0] * 10 + [1.0] * 20, lasting=10.0) == [1 / 8]


@given(st.lists(st.floats(0.72, 1.4), max_size=100))
def test_a_change_within_a_factor_of_two_is_ignored(speeds: list[float]) -> None:
    assert factors(speeds) == []


def test_the_planner_learns_of_a_node_that_became_ten_times_slower() -> None:
    world = steady_run()
    asked = world.state.planner.number
    timed_steps(world, 10, seconds=1.0)
    assert world.state.planner.number == asked
    timed_steps(world, 10, seconds=10.0)
    (drifted,) = world.events(ev.DeviceDrifted)
    assert drifted.node == "a"
    assert drifted.flops == pytest.approx(1e10)
    assert drifted.reason == "in training it is 10.0 times slower than before"
    world.wait(1, beating=["a", "b", "c"])
    assert world.state.planner.number == asked + 1


def test_a_node_that_is_slow_for_less_than_a_lease_is_ignored() -> None:
    world = steady_run()
    timed_steps(world, 10, seconds=1.0)
    timed_steps(world, 5, seconds=10.0)
    timed_steps(world, 10, seconds=1.0)
    assert world.events(ev.DeviceDrifted) == []


def test_a_link_that_became_slower_gets_a_lower_bandwidth() -> None:
    world = steady_run()
    before = world.state.ledger.reach.links["a"]["c"].bandwidth
    timed_steps(world, 10, seconds=1.0, arrived=1.0)
    timed_steps(world, 10, seconds=1.0, arrived=4.0)
    assert world.state.ledger.reach.links["a"]["c"].bandwidth == pytest.approx(before / 4)


def test_a_link_too_quick_to_be_timed_is_noticed_when_it_becomes_slow() -> None:
    world = steady_run()
    before = world.state.ledger.reach.links["a"]["c"].bandwidth
    timed_steps(world, 10, seconds=1.0, arrived=0.001)
    timed_steps(world, 10, seconds=1.0, arrived=4.0)
    assert world.state.ledger.reach.links["a"]["c"].bandwidth < before / 2


def test_a_link_too_quick_to_be_timed_gets_the_bandwidth_it_shows_once_it_is_slow() -> None:
    world = steady_run()
    quick = replace(world.state.ledger.reach.links["a"]["c"], bandwidth=1e12)
    world.state = replace(world.state, ledger=fold([ev.LinksMeasured("c", (quick,))], world.state.ledger))
    timed_steps(world, 10, seconds=1.0, arrived=0.001)
    timed_steps(world, 10, seconds=1.0, arrived=4.0)
    assert world.state.ledger.reach.links["a"]["c"].bandwidth == pytest.approx(1e9 / 4)


def test_times_that_are_a_small_part_of_a_step_are_ignored() -> None:
    world = steady_run()
    timed_steps(world, 10, seconds=0.001, arrived=0.001)
    timed_steps(world, 10, seconds=0.04, arrived=0.04)
    assert world.events(ev.DeviceDrifted) == []


def test_the_planner_learns_of_an_idle_node_that_became_faster() -> None:
    world = steady_run()
    world.join("d")
    asked = world.state.planner.number
    for _ in range(10):
        world.hear("d", heartbeat=wire.Heartbeat(flops=1e12))
        world.wait(LEASE / 4, beating=["a", "b", "c"])
    assert world.events(ev.DeviceDrifted) == [
        ev.DeviceDrifted("d", 1e12, "while idle it is 10.0 times faster than before")
    ]
    world.wait(1, beating=["a", "b", "c", "d"])
    assert world.state.planner.number == asked + 1


@pytest.mark.parametrize(
    ("said", "most"), [((1e11, 1e13, 1e11, 1e9, 1e11), 0), ((1e13, 1e9), 100 / WINDOW)], ids=["noise", "lies"]
)
def test_an_idle_node_that_says_another_speed_each_time_fills_neither_the_log_nor_the_planners_time(
    said: tuple[float, ...], most: float
) -> None:
    world = steady_run()
    world.join("d")
    asked = world.state.planner.number
    for number in range(100):
        world.hear("d", heartbeat=wire.Heartbeat(flops=said[number % len(said)]))
        world.wait(LEASE / 4, beating=["a", "b", "c"])
    assert len(world.events(ev.DeviceDrifted)) <= most
    assert world.state.planner.number - asked <= most


def test_the_speed_that_a_training_node_reports_is_ignored() -> None:
    world = steady_run()
    world.hear("a", heartbeat=wire.Heartbeat(flops=1e3))
    assert world.events(ev.DeviceDrifted) == []


def test_an_impossible_speed_in_a_heartbeat_is_refused() -> None:
    world = steady_run()
    world.join("d")
    world.hear("d", heartbeat=wire.Heartbeat(flops=float("nan")))
    assert world.last_to("d", "refusal").reason == wire.MALFORMED


def test_arrivals_of_zero_bytes_are_refused() -> None:
    world = steady_run()
    world.vote("a", arrived=[wire.StepReady.Arrived(source="b", bytes=0, seconds=1.0)])
    assert world.last_to("a", "refusal").reason == wire.MALFORMED


def test_one_who_names_a_source_twice_in_a_vote_is_refused() -> None:
    """Each entry counts as the speed of one step: several would fill the window by a single vote."""
    world = steady_run()
    world.vote("c", arrived=[wire.StepReady.Arrived(source="a", bytes=10**9, seconds=1.0)] * 2)
    assert world.last_to("c", "refusal").reason == wire.MALFORMED
    assert world.events(ev.LinksMeasured)[-1].reason == ""

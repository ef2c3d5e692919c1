"""Training notices devices and links whose speed changed, and ignores noise: `core/plan/drift.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.plan.drift import FACTOR
from dtfm.coordinator.core.plan.noise import compare
from dtfm.coordinator.core.plan.planner_input import measured_cluster
from dtfm.coordinator.core.state.measured import Speeds
from dtfm.coordinator.core.state.planner import PlanChosen
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.log.members import Member, planned_flops
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage
from tests.coordinator.drifting import FLOPS, steady_run, timed_steps
from tests.coordinator.ledgers import altered


def factors(speeds: list[float], *, lasting: float = 0.0, factor: float = FACTOR) -> list[float]:
    """The changes that are found in these speeds, seen a second apart."""
    seen, found = Speeds(), []
    for second, speed in enumerate(speeds):
        seen, ratio = compare(seen, speed, float(second), lasting, factor)
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


@given(st.floats(1.01, 10), st.lists(st.floats(0, 1), max_size=100))
def test_a_change_within_the_factor_is_ignored(factor: float, places: list[float]) -> None:
    least, most = factor**-0.49, factor**0.49
    assert factors([least + (most - least) * place for place in places], factor=factor) == []


def test_the_planner_learns_of_a_node_that_became_ten_times_slower() -> None:
    world = steady_run()
    asked = world.state.planner.number
    timed_steps(world, 10, seconds=1.0)
    assert world.state.planner.number == asked
    timed_steps(world, 10, seconds=10.0)
    (drifted,) = world.events(ev.DeviceDrifted)
    assert (drifted.node, drifted.reason) == ("a", "in training it is 10.0 times slower than planned")
    assert drifted.flops == pytest.approx(2.4e9)
    world.wait(1, beating=["a", "b", "c"])
    assert world.state.planner.number == asked + 1


def test_devices_that_train_beside_each_other_are_planned_as_they_train_and_so_are_idle_ones() -> None:
    world = steady_run()
    world.join("d", "e")
    timed_steps(world, 10, seconds=2.0, others=2.0)
    assert {drifted.node: drifted.flops for drifted in world.events(ev.DeviceDrifted)} == {
        node: pytest.approx(flops / 2) for node, flops in FLOPS.items()
    }
    ledger = world.state.ledger
    assert planned_flops(ledger, "ad") == [pytest.approx(1.2e10), pytest.approx(5e10)]
    assert [node.flops for node in measured_cluster(ledger, "ad").nodes] == planned_flops(ledger, "ad")
    assert planned_flops(world.refolded(), "ad") == planned_flops(ledger, "ad")
    timed_steps(world, 20, seconds=2.0, others=2.0)
    assert len(world.events(ev.DeviceDrifted)) == 3


def test_one_device_that_is_slow_makes_no_idle_one_count_less() -> None:
    world = steady_run()
    world.join("d")
    timed_steps(world, 10, seconds=10.0)
    assert planned_flops(world.state.ledger, "abd") == [pytest.approx(2.4e9), 1.2e10, 1e11]


def test_one_of_two_that_becomes_slow_does_not_make_the_other_count_as_slow() -> None:
    device = ev.DeviceSeen("cpu", "", 1, 1e11)
    members = {"a": Member("", device, ""), "b": Member("", device, "", in_training=1e9)}
    stages = (Stage((0, 4), ("a", "b"), (5, 5), (1, 1)),)
    ledger = altered(Ledger(), members=members, plan=Plan(1, stages, ()))
    assert planned_flops(ledger, "ab") == [1e11, 1e9]


def test_what_steps_take_longer_than_predicted_though_devices_do_as_planned_counts_as_overhead_of_every_plan() -> None:
    world = steady_run()  # its planner predicts 1 s
    asked = world.state.planner.number
    timed_steps(world, 20, seconds=1.0, each=3.0)
    (repriced,) = world.events(ev.PlanRepriced)
    assert [repriced.predicted_seconds, repriced.overhead_seconds] == pytest.approx([3.0, 2.0])
    assert repriced.lower_bound_seconds == pytest.approx(2.5)
    assert "Steps take 3 s, 1 s were predicted: of each step, 2 s count as overhead from now on." in repriced.narrate()
    assert world.state.planner.number == asked  # it is the same for all plans
    world.automatic_planning = False
    world.feed(t.Asked(7, wire.PlanNowRequest(), "operator", 0.0))
    assert world.wanted[0].overhead == pytest.approx(2.0)


def test_the_overhead_falls_with_the_time_of_steps_but_not_below_nothing() -> None:
    world = steady_run()
    timed_steps(world, 20, seconds=1.0, each=3.0)
    timed_steps(world, 20, seconds=1.0, each=2.0)
    timed_steps(world, 60, seconds=1.0, each=0.5)
    _, falls, ends = world.events(ev.PlanRepriced)
    assert [falls.predicted_seconds, falls.overhead_seconds] == pytest.approx([2.0, 1.0])
    assert [ends.predicted_seconds, ends.overhead_seconds] == pytest.approx([1.0, 0.0])


def test_a_plan_without_a_bound_gets_none_when_its_price_falls() -> None:
    """Plans of islands have none, which is 0. It was -0.165 s once the overhead of steps fell."""
    world = steady_run()
    timed_steps(world, 20, seconds=1.0, each=3.0)
    training = replace(world.state.ledger.training, bound=0.0)
    world.state = replace(world.state, ledger=replace(world.state.ledger, training=training))
    timed_steps(world, 20, seconds=1.0, each=2.0)
    repriced = world.events(ev.PlanRepriced)[-1]
    assert repriced.predicted_seconds == pytest.approx(2.0)
    assert repriced.lower_bound_seconds is None
    assert "at best" not in repriced.narrate()


def test_a_step_is_compared_only_once_devices_do_as_planned_and_the_planner_has_looked_again() -> None:
    world = steady_run()
    world.automatic_planning = False
    timed_steps(world, 20, seconds=2.0, each=3.0)
    assert [type(event) for event in world.log if isinstance(event, ev.DeviceDrifted | ev.PlanRepriced)] == [
        ev.DeviceDrifted
    ]
    plan, wanted = world.plan_in_force, world.wanted.pop()
    world.feed(t.Planned(wanted.number, PlanChosen(plan, "It stays.", 2.9, 0.5)))
    (repriced,) = world.events(ev.PlanRepriced)
    step = world.state.ledger.training.corrected
    assert 0 < step < 20
    assert repriced.reason == f"It stays. Speeds are as corrected after step {step}."
    timed_steps(world, 20, seconds=2.0, each=3.0)
    assert world.events(ev.PlanRepriced) == [repriced]
    assert (world.state.ledger.training.predicted, world.state.ledger.training.overhead) == (2.9, 0.0)


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


@pytest.mark.parametrize("arrived", [[(0, 1.0)], [(10**9, 1.0)] * 2], ids=["zero bytes", "a source twice"])
def test_impossible_arrivals_are_refused(arrived: list[tuple[int, float]]) -> None:
    """Each entry counts as the speed of one step: several of a source would fill the window by a single vote."""
    world = steady_run()
    said = [wire.StepReady.Arrived(source="a", bytes=size, seconds=seconds) for size, seconds in arrived]
    world.vote("c", arrived=said)
    assert world.last_to("c", "refusal").reason == wire.MALFORMED
    assert world.events(ev.LinksMeasured)[-1].reason == ""

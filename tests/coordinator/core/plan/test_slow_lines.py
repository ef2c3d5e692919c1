"""A line that becomes slow within a step is planned around within that step: `core/plan/slow_lines.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from dtfm.coordinator.core.phases import Stepping, Switching
from dtfm.coordinator.core.timeouts import PROBE_LEASES
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.answers import links
from tests.coordinator.drifting import steady_run, timed_steps
from tests.coordinator.script import LAYERS, LEASE, World, refusal_of

NODES = ["a", "b", "c"]


def without_c(ids: Iterable[str]) -> Plan:
    stages = [Stage((0, LAYERS // 2), ("a",), ()), Stage((LAYERS // 2, LAYERS), ("b",), ())]
    return from_routes(0, stages, [(("a", "b"), 4)], ("c",))


def training_over_a_line() -> World:
    """a's line to c carries 1 GB/s in steps of 2 s. The planner answers when it is told to."""
    world = steady_run()
    timed_steps(world, 10, seconds=1.0, arrived=1.0)
    world.automatic_planning = False
    world.planner = without_c
    return world


def waits(world: World, *, size: int, seconds: float) -> None:
    """Lets time pass in the current step. Then c reports this amount from a since then, in this number of seconds."""
    world.wait(seconds, beating=NODES)
    came = wire.StepReady.Arrived(source="a", bytes=size, seconds=seconds)
    world.hear("c", heartbeat=wire.Heartbeat(arriving=[came]))


def test_a_line_that_falls_to_a_fiftieth_is_planned_around_before_the_step_ends() -> None:
    """Only the commit said so, after fifty times as long as a step takes."""
    world = training_over_a_line()
    step, before = world.state.ledger.training.step, world.state.ledger.reach.links["a"]["c"].bandwidth
    waits(world, size=10**8, seconds=0.5 * LEASE)
    assert world.state.ledger.reach.links["a"]["c"].bandwidth == pytest.approx(before / 50)
    assert world.last_to("a", "links_changed").links[0].destination == "c"
    assert len(world.wanted) == 1
    world.plan()
    (aborted,) = world.events(ev.StepAborted)
    assert aborted.narrate() == f"step {step + 1} was aborted: the line from a to c is 50 times slower than usual"
    assert isinstance(world.state.phase, Switching)
    assert world.plan_in_force.nodes == ("a", "b")
    assert (
        world.events(ev.PlanAdopted)[-1].counts_from < world.state.ledger.training.generation
    )  # work done so far counts
    assert world.events(ev.Suspected) == []
    world.settle()
    world.step()
    assert world.state.ledger.training.step == step + 1
    assert world.refolded() == world.state.ledger


def test_a_plan_that_comes_late_does_not_interrupt_a_step_that_is_quick() -> None:
    world = training_over_a_line()
    waits(world, size=10**8, seconds=0.5 * LEASE)
    timed_steps(world, 1, seconds=1.0)
    world.plan()
    assert world.events(ev.StepAborted) == []
    assert isinstance(world.state.phase, Stepping)


@pytest.mark.parametrize(
    ("size", "seconds"), [(10**8, 0.4 * LEASE), (10**9, 0.5 * LEASE)], ids=["too early", "five times slower"]
)
def test_what_may_pass_is_left_to_the_commits(size: int, seconds: float) -> None:
    world = training_over_a_line()
    waits(world, size=size, seconds=seconds)
    assert world.wanted == []


def test_a_line_of_which_nothing_is_known_and_a_node_without_a_part_say_nothing() -> None:
    world = training_over_a_line()
    for source, node in (("b", "c"), ("c", "b"), ("z", "c")):
        world.wait(0.5 * LEASE, beating=NODES)
        came = wire.StepReady.Arrived(source=source, bytes=1, seconds=0.5 * LEASE)
        world.hear(node, heartbeat=wire.Heartbeat(arriving=[came]))
    assert world.wanted == []


@pytest.mark.parametrize("seconds", [-1.0, math.nan, 1e9])
def test_impossible_arrivals_are_refused(seconds: float) -> None:
    world, came = training_over_a_line(), wire.StepReady.Arrived(source="a", bytes=1, seconds=seconds)
    stream = world.streams["c"]
    world.hear("c", heartbeat=wire.Heartbeat(arriving=[came]))
    assert refusal_of(world, stream).reason == wire.MALFORMED


def test_a_line_that_was_slow_is_measured_again_once_no_plan_uses_it() -> None:
    world = training_over_a_line()
    waits(world, size=10**8, seconds=0.5 * LEASE)
    assert "probe" not in world.kinds_to("a")[-3:]
    world.plan()
    world.settle()
    for _ in range(PROBE_LEASES + 1):
        world.wait(LEASE, beating=NODES)
        world.step()
    assert [peer.node for peer in world.last_to("a", "probe").peers] == ["c"]
    while world.wanted:
        world.plan()
    asked = world.state.planner.number
    world.hear("a", links("a", ["c"]))
    assert "times faster than before" in world.events(ev.LinksMeasured)[-1].narrate()
    assert world.state.planner.number == asked + 1
    assert world.state.members.slow == {}

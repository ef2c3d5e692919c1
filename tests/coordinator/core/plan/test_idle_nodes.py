"""An idle node is not forgotten: the planner looks at it again, and its device is timed again."""

from __future__ import annotations

import math

import pytest

from dtfm.coordinator.core.phases import Pausing
from dtfm.coordinator.core.plan.drift import DEVICE_OFF
from dtfm.coordinator.core.timeouts import GRACE_LEASES, IDLE_AGAIN_LEASES, TIMED_LEASES
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.members import Member, planned_flops
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage
from tests.coordinator.ledgers import altered
from tests.coordinator.script import LEASE, LONG, World, prepared, refusal_of, training


def with_an_idle_node() -> World:
    """a and b train, and c is idle."""
    world = training("a", "b", **LONG)
    world.stick_to_plan()
    world.join("c")
    return world


def steps(world: World, count: int, *, each: float) -> None:
    for _ in range(count):
        world.wait(each, beating=["a", "b", "c"])
        world.step()


def test_a_plan_waits_only_so_long_for_a_newcomer_whose_copy_never_keeps_up() -> None:
    """With short steps on a busy machine a copy may always be some steps behind. The plan with it waited for a hundred leases:
    the node was idle until somebody restarted the coordinator."""
    world = training("a", "b", **LONG)
    world.automatic_standbys = False
    world.join("c")
    assert world.state.planner.chosen is not None
    while not isinstance(world.state.phase, Pausing):
        steps(world, 1, each=1.0)
        assert world.state.ledger.training.step < 96
    assert world.state.ledger.training.step > GRACE_LEASES * LEASE - 5
    world.apply()
    assert "c" in world.plan_in_force.nodes


def test_a_node_that_comes_back_as_the_same_process_is_looked_at_again() -> None:
    """Its links and its device were measured again, so that the answer of before may be wrong."""
    world = with_an_idle_node()
    asked = world.state.planner.number
    world.lose("c")
    assert world.state.planner.number == asked
    world.join("c")
    assert world.state.planner.number == asked + 1


def test_while_a_node_is_idle_the_planner_looks_again_now_and_then() -> None:
    world = with_an_idle_node()
    asked = world.state.planner.number
    steps(world, IDLE_AGAIN_LEASES - 2, each=LEASE)
    assert world.state.planner.number == asked
    steps(world, 4, each=LEASE)
    assert world.state.planner.number == asked + 1
    world.lose("c")
    steps(world, IDLE_AGAIN_LEASES + 2, each=LEASE)
    assert world.state.planner.number == asked + 1


def test_an_idle_device_that_was_timed_again_counts_with_its_new_speed() -> None:
    world = with_an_idle_node()
    asked = world.state.planner.number
    world.hear("c", timed=wire.Timed(flops=4e11))
    (timed,) = [event for event in world.events(ev.DeviceTimed) if event.reason]
    assert (
        timed.narrate() == "c changed its speed: timed again on a quiet machine, it counts with 400 GFLOP/s and not 100"
    )
    assert planned_flops(world.state.ledger, "c") == planned_flops(world.refolded(), "c") == [4e11]
    assert world.state.planner.number == asked + 1


def test_small_changes_and_reports_that_come_too_often_are_ignored() -> None:
    world = with_an_idle_node()
    logged = len(world.log)
    world.hear("c", timed=wire.Timed(flops=1e11 * math.sqrt(DEVICE_OFF)))
    world.hear("c", timed=wire.Timed(flops=1e13))
    world.hear("a", timed=wire.Timed(flops=1e13))  # it trains
    assert len(world.log) == logged
    steps(world, 1, each=TIMED_LEASES * LEASE)
    world.hear("c", timed=wire.Timed(flops=1e13, beside=True))
    assert "beside other programs" in world.events(ev.DeviceTimed)[-1].reason


@pytest.mark.parametrize("flops", [0.0, -1.0, math.nan, math.inf, 1e30])
def test_a_speed_that_no_device_has_is_refused(flops: float) -> None:
    world = with_an_idle_node()
    stream = world.streams["c"]
    world.hear("c", timed=wire.Timed(flops=flops))
    assert refusal_of(world, stream).reason == wire.MALFORMED


def test_what_is_timed_beside_others_is_not_taken_to_be_slower_still_in_training() -> None:
    """On one machine, b was timed while a trained: it got its share of the cores already."""
    device = ev.DeviceSeen("cpu", "", 1, 1e11)
    slow = ev.DeviceSeen("cpu", "", 1, 5e10)
    members = {
        "a": Member("", device, "", in_training=5e10),
        "b": Member("", slow, "", timed_beside=True),
        "c": Member("", device, ""),
    }
    ledger = altered(Ledger(), members=members, plan=Plan(1, (Stage((0, 4), ("a",), (5,)),), ()))
    assert planned_flops(ledger, "abc") == [5e10, 5e10, 5e10]


def test_the_log_knows_that_a_newcomer_was_timed_beside_others() -> None:
    world = training("a", "b", **LONG)
    world.stick_to_plan()
    said = prepared(flops=3e10)
    said.prepared.timed_beside = True
    world.prepare("c", said)
    assert world.state.ledger.members["c"].timed_beside
    assert "beside other programs" in world.events(ev.DeviceTimed)[-1].narrate()


def test_an_idle_node_is_told_why_and_again_only_when_that_changes() -> None:
    world = with_an_idle_node()
    stream = world.streams["c"]

    def said() -> list[str]:
        return [told.idle for told in world.told[stream] if told.HasField("idle")]

    (first,) = said()
    assert "It would help" in first
    steps(world, 3, each=1.0)
    assert said() == [first]
    world.hear("c", timed=wire.Timed(flops=1e9))
    assert said()[1].startswith("its device is 100.0 times slower than the slowest in the plan")
    assert not any(told.HasField("idle") for told in world.told[world.streams["a"]])

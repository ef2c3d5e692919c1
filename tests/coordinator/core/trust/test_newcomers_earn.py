"""Plans of an open run, made by the scheduler itself. A stranger begins beside proven members, and its part grows with the speed
that it shows."""

from __future__ import annotations

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import LONG
from tests.coordinator.strangers import Planning, audited, come, open_run

HONEST = 1e10
"""What all nodes really compute, in FLOP/s."""


def device(flops: float) -> wire.Device:
    return wire.Device(kind="cpu", name="a cpu", memory_bytes=1 << 33, flops=flops)


def run_of_two(*proven: str) -> Planning:
    """a and b train; these of them are proven."""
    train = {**LONG["train"], "global_batch": 64}
    world = Planning(open_run(2, **{**LONG, "train": train}, cluster={"stages": "auto"}))
    come(world, "a", "b", device=device(HONEST))
    world.settle()
    for node in proven:
        audited(world, node, True, True, True)
    return world


def test_a_newcomer_that_claims_a_hundred_times_more_gets_no_stage_alone_and_then_what_it_delivers() -> None:
    world = run_of_two("a", "b")
    come(world, "c", device=device(100 * HONEST))
    world.switch()
    plan = world.plan_in_force
    assert "c" in plan.nodes
    assert all({"a", "b"} & set(stage.replicas) for stage in plan.stages)
    assert world.share_of("c") <= 0.4
    audited(world, "c", True, True)  # its claim counts for more now, but it is still one
    for _ in range(20):
        world.timed_step({})
    assert world.state.ledger.members["c"].in_training == pytest.approx(HONEST, rel=0.01)
    drifted = world.events(ev.DeviceDrifted)
    assert [event.node for event in drifted] == ["c"]
    assert "it is 100.0 times slower than planned" in drifted[0].reason
    assert world.share_of("c") <= 1 / 3


def test_an_honest_newcomers_part_grows_with_each_audit_until_it_is_whole() -> None:
    world = run_of_two("a", "b")
    come(world, "c", device=device(HONEST))
    shares = [world.share_of("c")]
    for _ in range(3):
        world.switch()
        shares.append(world.share_of("c"))
        audited(world, "c", True)
        world.wait(1, beating="abc")
    world.switch()
    shares.append(world.share_of("c"))
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]
    assert shares[-1] == pytest.approx(1 / 3, abs=0.1)
    assert world.events(ev.DeviceDrifted) == []


def test_nobody_can_show_that_another_claims_too_much_but_each_is_taken_at_its_word_that_it_is_slower() -> None:
    world = run_of_two("a", "b")
    for _ in range(20):
        world.timed_step({}, votes={"b": 100 * HONEST})
    assert [event.node for event in world.events(ev.DeviceDrifted)] == ["b"]
    for _ in range(20):
        world.timed_step({"a": HONEST / 100})
    drifted = {event.node: event.flops for event in world.events(ev.DeviceDrifted)}
    assert drifted["a"] == pytest.approx(HONEST / 100, rel=0.01)


def test_a_new_plan_is_made_when_a_node_becomes_proven() -> None:
    world = run_of_two()
    asked = world.state.planner.number
    world.wait(1, beating="ab")
    assert world.state.planner.number == asked
    audited(world, "a", True, True, True)
    world.wait(1, beating="ab")
    assert world.state.planner.number > asked


def test_a_device_that_is_really_much_faster_is_given_more_each_time_that_it_shows_it() -> None:
    world = run_of_two("a", "b")
    come(world, "c", device=device(16 * HONEST))
    audited(world, "c", True, True, True)
    shares = []
    for _ in range(40):
        world.timed_step({"c": 16 * HONEST})
        shares.append(world.share_of("c"))
    shown = [event.flops for event in world.events(ev.DeviceShown)]
    assert shown == sorted(set(shown))
    assert world.events(ev.DeviceDrifted) == []
    assert shares[2] <= 0.6
    assert shares[-1] > 0.85  # 16/18 is what it can do


def test_whoever_only_votes_that_it_is_fast_shows_nothing() -> None:
    world = run_of_two("a", "b")
    come(world, "c", device=device(16 * HONEST))
    audited(world, "c", True, True, True)
    for _ in range(40):
        world.timed_step({}, votes={"c": 16 * HONEST})
    assert world.share_of("c") <= 0.6
    assert all(event.flops <= 1.1 * HONEST for event in world.events(ev.DeviceShown))

"""A node that beats and does nothing, while others wait for it, is left out after a lease and the time of a step."""

from __future__ import annotations

from collections.abc import Iterable

from dtfm.coordinator.core.phases import Pausing, Stepping, Switching
from dtfm.coordinator.core.plan.expected import SLOWEST_DISK
from dtfm.coordinator.core.timeouts import HEARTBEAT_LEASES
from dtfm.coordinator.core.transition import TimePassed
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire, plan_pb2
from tests.coordinator.accused import goes_on_without, verdicts
from tests.coordinator.script import LAYERS, LEASE, LONG, World, prepared, training

STEP = 1.0
"""Seconds that the planner predicts for a step."""


def beat(world: World, seconds: float, busy: Iterable[str] = (), hung: Iterable[str] = ()) -> None:
    """Time passes. The ``busy`` nodes do something, the ``hung`` ones do nothing, and all others wait."""
    busy, hung, until = set(busy), set(hung), world.now + seconds
    before = world.state.ledger.training.generation
    while world.now < until and world.state.ledger.training.generation == before:
        world.now += LEASE * HEARTBEAT_LEASES
        for node in sorted(world.state.members.sessions):
            done = int(world.now * 10) if node in busy else 7
            work = wire.Heartbeat.Work(done=done, waits=node not in busy | hung)
            world.hear(node, heartbeat=wire.Heartbeat(work=work))
        world.feed(TimePassed())


def out(world: World) -> set[str]:
    return set(world.state.ledger.ready) - set(world.state.ledger.working)


def five(**changes: dict[str, object]) -> World:
    world = training("a", "b", "c", "d", **{**LONG, **changes})
    world.automatic_tests = False
    world.step()
    return world


def test_who_hangs_is_left_out_after_a_lease_and_a_step_and_the_others_go_on() -> None:
    world = five()
    began = world.now
    beat(world, 10 * LEASE, hung="d")
    assert out(world) == {"d"}
    assert world.now - began <= LEASE + STEP + 2 * LEASE * HEARTBEAT_LEASES
    aborted = world.events(ev.StepAborted)[-1]
    assert (aborted.problem, aborted.node) == ("OVERDUE", "d")
    assert "while others wait for it, though heartbeats came; look at its device" in aborted.reason
    assert verdicts(world) == []
    world.settle()
    goes_on_without(world)
    assert "d" in world.state.members.sessions


def test_in_the_first_step_of_a_plan_too() -> None:
    world = training("a", "b", "c", "d", **LONG)
    world.automatic_tests = False
    began = world.now
    beat(world, 10 * LEASE, hung="d")
    assert out(world) == {"d"}
    assert world.now - began <= 2 * LEASE


def test_while_it_becomes_ready_for_a_plan() -> None:
    world = World()
    world.join("a", "b", "c")
    world.automatic_tests = False
    assert isinstance(world.state.phase, Switching)
    for node in "ac":
        world.plan_ready(node)
    began = world.now
    beat(world, 10 * LEASE, hung="b")
    assert out(world) == {"b"}
    assert world.now - began <= 2 * LEASE
    world.settle()
    goes_on_without(world)


def beginning_with(layer_bytes: int) -> World:
    """Nodes become ready for the first plan of a run whose layers' parameters have this size. They draw or read them."""
    world = World()
    world.automatic_tests = False
    layers = [plan_pb2.Layer(name="layer", forward_flops=1e9, parameter_bytes=layer_bytes)] * LAYERS
    for node in "abc":
        world.prepare(node, prepared(layers=layers))
        world.report_links(node)
    world.join()
    for node in "ac":
        world.plan_ready(node)
    return world


def test_at_the_start_of_a_run_it_may_take_as_long_as_its_largest_layer_takes_to_draw_or_to_read() -> None:
    world = beginning_with(int(10 * SLOWEST_DISK))
    beat(world, 3 * 10.0, hung="b")
    assert out(world) == set()
    beat(world, 3 * LEASE, hung="b")
    assert out(world) == {"b"}


def test_becoming_ready_may_take_as_long_as_all_layers_take_to_draw_or_to_read_while_it_makes_progress() -> None:
    world = beginning_with(int(100 * SLOWEST_DISK))
    beat(world, 3 * 100.0 * LAYERS / 2, busy="b")
    assert out(world) == set()
    assert isinstance(world.state.phase, Switching)


def test_while_it_confirms_a_commit() -> None:
    world = five()
    world.join("e")
    world.step()
    assert isinstance(world.state.phase, Pausing)
    began = world.now
    beat(world, 10 * LEASE, hung="d")
    assert out(world) == {"d"}
    assert world.now - began <= 2 * LEASE


def test_who_goes_on_however_slowly_is_only_slow() -> None:
    world = five()
    beat(world, 2 * LEASE, busy="d")
    assert out(world) == set()
    assert isinstance(world.state.phase, Stepping)


def test_its_reported_progress_is_believed_up_to_three_times_the_expected_time() -> None:
    world = five()
    assert isinstance(world.state.phase, Stepping)
    for node in "abc":
        world.vote(node)
    most = world.state.phase.deadline - world.state.phase.since
    assert most <= 3 * STEP + 4 * LEASE
    beat(world, most + LEASE, busy="d")
    assert out(world) == {"d"}


def test_nobody_is_left_out_while_others_still_work() -> None:
    world = five()
    beat(world, 2 * LEASE, busy="a", hung="d")
    assert out(world) == set()


def test_where_all_say_that_they_wait_for_each_other_the_step_is_tried_again() -> None:
    world = five()
    world.automatic_tests = True
    beat(world, 10 * LEASE)
    assert world.events(ev.StepAborted)[-1].problem == "OVERDUE"
    world.wait(LEASE, beating="abcd")
    assert out(world) == set()
    world.settle()
    goes_on_without(world)


def test_a_node_of_whose_work_nothing_is_known_has_until_the_deadline() -> None:
    world = five()
    world.wait(2 * LEASE, beating="abcd")
    assert out(world) == set()

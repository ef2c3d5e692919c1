"""How a plan comes into force, or fails to: `core/plan/adoption.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from dtfm.coordinator.core.phases import Stepping, Switching
from dtfm.coordinator.core.timeouts import READY_LEASES
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.accused import verdicts
from tests.coordinator.script import LAYERS, LEASE, LONG, World, fresh_state, training


def test_a_plan_goes_to_every_ready_node_and_begins_when_its_nodes_are_ready() -> None:
    world = World()
    world.join("a", "b")
    assert isinstance(world.state.phase, Switching)
    assignment = world.last_to("a", "assignment")
    assert assignment.generation == 1
    assert [peer.node for peer in assignment.peers] == ["a", "b"]
    assert (assignment.step, assignment.snapshot.folder) == (0, "")
    assert world.donors_to("a") == [[], [], [], []]
    world.plan_ready("a")
    assert "begin" not in world.kinds_to("a")
    world.plan_ready("b")
    assert world.last_to("a", "begin") == world.last_to("b", "begin") == wire.Begin(generation=1, step=1)


def test_a_plan_that_cannot_start_is_adopted_again_and_a_run_of_people_who_know_each_other_ends_if_two_cannot() -> None:
    world = World()
    world.join("a", "b")
    for node in "abab":
        assert world.exit_code is None
        world.wait(3 * LEASE, beating="ab")
        world.fail_plan(node, "no memory")
    assert [event.generation for event in world.events(ev.PlanAdopted)] == [1, 2, 3, 4]
    assert world.exit_code == 1
    assert "b could not take its part in plan 4: no memory" in world.last_to("a", "finish").reason


def test_messages_about_an_older_plan_are_ignored() -> None:
    world = World()
    world.join("a", "b")
    world.fail_plan("a", "x")
    world.hear("a", plan_failed=wire.PlanFailed(generation=1, problem="late"))
    world.hear("a", plan_ready=wire.PlanReady(generation=1))
    phase = world.state.phase
    assert isinstance(phase, Switching)
    assert (phase.awaiting, phase.since) == (frozenset("ab"), world.now)


def test_a_plan_past_its_deadline_fails_even_if_heartbeats_arrive() -> None:
    world = World()
    world.join("a", "b")
    world.plan_ready("a")
    world.wait((READY_LEASES + 1) * LEASE, beating=["a", "b"])
    assert world.events(ev.PlanFailed)[-1].node == "b"


def test_losing_a_node_while_state_moves_leads_to_another_plan() -> None:
    world = World(fresh_state(cluster={"nodes": 3}))
    world.join("a", "b", "c")
    world.plan_ready("a")
    world.lose("b")
    assert world.plan_in_force.nodes == ("a", "c")
    world.settle()
    assert isinstance(world.state.phase, Stepping)


def test_a_newcomer_gets_its_place_at_the_next_commit() -> None:
    world = training("a", "b")
    world.join("c")
    assert isinstance(world.state.phase, Stepping)
    assert world.events(ev.PlanAdopted)[-1].generation == 1
    world.step()
    assert world.last_to("a", "commit").pause
    world.apply()
    adopted = world.events(ev.PlanAdopted)[-1]
    assert (adopted.generation, adopted.plan.nodes) == (2, ("a", "b", "c"))
    assert world.donors_to("c") == [["a"], ["a"], ["b"], ["b"]]


def test_a_newcomer_that_leaves_before_the_switch_changes_nothing() -> None:
    world = training("a", "b")
    world.join("c")
    world.lose("c")
    world.step()
    assert not world.last_to("a", "commit").pause
    assert world.events(ev.PlanAdopted)[-1].generation == 1


def test_a_newcomer_that_leaves_during_the_pause_does_not_stop_the_others() -> None:
    world = training("a", "b")
    world.join("c")
    world.step()
    world.lose("c")
    world.apply()
    world.settle()
    assert world.last_to("a", "begin").step == 2


def without_its_only_holder(*oldest_first: str, **changes: dict[str, Any]) -> World:
    """A run of strangers, each with a key of its own. Of a, b and m, m alone has the second stage after step 5, and wants to
    leave: b is to get its state."""
    changes = {**LONG, "cluster": {"nodes": len(oldest_first)}, "trust": {"mode": "open"}, **changes}
    world = World(fresh_state(**changes))
    for node in oldest_first:
        world.belong_together(node, key=f"key of {node}")
    world.join(*oldest_first)
    world.report_links(oldest_first[0])  # it had to wait until two had said what the run is
    world.wait(LEASE, beating=oldest_first)
    world.settle()
    for _ in range(4):
        world.step()
        if world.state.safekeeping.snapshot:
            world.save()
    world.automatic_standbys = False
    world.hear("m", leaving=wire.Leaving(reason="bye"))
    copies(world, "b", "m sent nothing")
    world.step()
    world.apply()
    assert world.plan_in_force.nodes == ("a", "b")
    assert set(world.donors_to("b")[LAYERS - 1]) == {"m"}
    return world


def copies(world: World, node: str, problem: str) -> None:
    """The node cannot copy what it was asked to copy beside the steps."""
    number = world.last_to(node, "standby").number
    world.hear(node, standby_progress=wire.StandbyProgress(number=number, problem=problem))


@pytest.mark.parametrize("oldest_first", ["abm", "mab"])
def test_a_node_and_the_only_holder_that_it_cannot_reach_are_kept_apart_and_neither_is_to_blame(
    oldest_first: str,
) -> None:
    world = without_its_only_holder(*oldest_first)
    world.fail_plan("b", f"bucket {LAYERS - 1} could not be fetched: m sent nothing", peer="m")
    assert world.state.ledger.reach.broken == {("b", "m")}
    assert (world.exit_code, verdicts(world)) == (None, [])
    assert set(world.state.ledger.working) == {"a", "b", "m"}


def shared_by_two_holders(**changes: dict[str, Any]) -> World:
    """After step 3, which has a checkpoint, c and d are to get state that both a and b have."""

    def plan(ids: Iterable[str]) -> Plan:
        names = tuple(sorted(ids))
        return from_routes(0, [Stage((0, LAYERS), names, ())], [((names[0],), 4)])

    world = World(fresh_state(**{**LONG, "cluster": {"nodes": 2, "stages": 1}, **changes}), planner=plan)
    for node in "abcd":
        world.belong_together(node, key=f"key of {node}")
    world.join("a", "b")
    world.settle()
    for _ in range(2):
        world.step()
    world.join("c", "d")
    world.step()
    if world.state.safekeeping.snapshot:
        world.save()
    world.apply()
    assert isinstance(world.state.phase, Switching)
    assert world.plan_in_force.nodes == tuple("abcd")
    return world


def test_two_strangers_cannot_send_training_back() -> None:
    world = shared_by_two_holders(trust={"mode": "open"}, checkpoint={"every": 3})
    for node in "cd":
        world.fail_plan(node, "no state came")
    assert world.events(ev.RolledBack) == []
